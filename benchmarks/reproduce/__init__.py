"""The paper's tables and ablations over whatever data is present: `mdps reproduce`, see `run`."""

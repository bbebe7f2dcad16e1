"""`mdps serve`: a detector on the Open Inference Protocol over HTTP, and the screen beside the line."""

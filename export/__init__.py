"""torch -> bundle."""

from mdps.export.bundle import export_bundle
from mdps.export.options import ExportOptions

__all__ = ["ExportOptions", "export_bundle"]

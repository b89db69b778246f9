"""A stand-alone reward service. Importing this package costs nothing: workers import it in other environments too."""

__version__ = "0.1.0"

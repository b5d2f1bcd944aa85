"""The report as terminal text and as one HTML file."""

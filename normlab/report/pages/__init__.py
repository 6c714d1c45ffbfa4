"""The HTML shell that all pages share, and the export of their figures as images."""

"""Weight formats, one plug-in file per format; the name of the file is the name of the format."""

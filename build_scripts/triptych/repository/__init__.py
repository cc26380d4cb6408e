"""The files of a model repository: configs, rendering, one writer, locks; it derives no number."""

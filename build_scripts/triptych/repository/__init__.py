"""The files of a model repository: configs, rendering, manifests, one writer, static checks."""

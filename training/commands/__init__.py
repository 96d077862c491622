"""One module per `training` command, each a thin shell over the package's documented functions."""

"""The bundled tiny model: files in the layout transformers reads."""

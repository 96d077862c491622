"""How well drafters foresee what the model says, by the server's own drafting code and the server's own counts."""

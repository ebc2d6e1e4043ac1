"""Where frameworks let refold in: one small module each, imported only by who uses that framework."""

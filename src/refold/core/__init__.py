"""What is true without any effect: messages, events, the view, and the rules between them."""

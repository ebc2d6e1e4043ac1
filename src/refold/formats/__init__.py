"""The providers' dialects: `parse` reads one of their messages, `render` writes one."""

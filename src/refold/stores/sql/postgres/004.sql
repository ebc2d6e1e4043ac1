-- Where something was said whose conversation nobody knows: by ids that begin with a tilde, and only those.
CREATE INDEX refold_entry_located ON refold_entry (sha256(id)) WHERE substr(id, 1, 1) = '~'::bytea;

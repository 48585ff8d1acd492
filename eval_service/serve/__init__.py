"""Everything that touches Ray: the deployments, and the command that starts them. Nothing else imports it."""

"""Who may ask the service for what: tokens and scopes, rates, and the hosts that it may be made to call."""

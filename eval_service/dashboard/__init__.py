"""The dashboard: files that `eval_service.gateway.dashboard` serves as they are; docs/dashboard.md is about them."""

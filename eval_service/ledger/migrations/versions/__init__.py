"""The steps, one a version of the schema; one that was released is never changed."""

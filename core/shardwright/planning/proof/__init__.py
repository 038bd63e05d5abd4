"""The language of certificates, and the checker of proofs."""

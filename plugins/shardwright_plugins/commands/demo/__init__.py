"""`shardwright demo`: a DLRM whose embedding tables are sharded over local processes, trained end to end."""

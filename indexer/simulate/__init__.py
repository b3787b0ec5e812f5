"""A simulated fleet: engines without a model that publish KV-cache events exactly as real ones do.

`cache` says what every cache does, `pool` (vLLM) and `tree` (SGLang) do it, `scheduler` runs requests through one of
them, `encode` turns what it did into the bytes of one engine version, `engine` publishes them over real sockets,
`workload` invents the requests and `fleet` drives several engines against a running service and checks its answers.
Nothing here shares code with the reader's side (`indexer.wire`, `indexer.identity`, `indexer.index`): the fleet is also
a test of it.
"""

"""Sharded checkpoints through orbax: one orbax checkpoint a layer, checksums and a manifest that is written last.

    DIRECTORY/
      manifest.json           format version, slots, shapes and chunks of every array, size of every file
      checksums-P.json        CRC-32 of every chunk that process P wrote
      parts/layer-00003/…     orbax checkpoints: one flat dict {"model.layers.3.….packed": array} each
      parts/rest/…            embedding, norm, head
      config.json, tiktoken.model, …

orbax writes; reading goes through its storage layer (tensorstore) directly, because a stack of expert slots is read
onto other slots than it was written from, expert by expert, and each chunk is checked against its checksum. So only
`writer` imports orbax.
"""

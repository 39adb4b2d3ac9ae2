"""The language of every machine: run config, codecs, digests, wire formats, the reduce."""

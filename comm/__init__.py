"""What every machine speaks: run config, codecs, digests, wire formats, the reduce."""

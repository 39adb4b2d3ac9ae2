"""The control plane's protobuf messages; generated, do not edit."""

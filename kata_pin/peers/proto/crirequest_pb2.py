"""Messages of crirequest.proto: written by scripts/proto, do not edit."""

from kata_pin.peers.proto import define

define(
    __name__,
    b'\n\x10crirequest.proto\x12\x0ckata_pin.cri"m\n\x1fUpdateContainerResourcesRequest\x12\x14\n\x0cc'
    b'ontainer_id\x18\x01 \x01(\t\x124\n\x05linux\x18\x02 \x01(\x0b2%.kata_pin.cri.LinuxContainerResources"'
    b'\x9d\x01\n\x17LinuxContainerResources\x12\x12\n\ncpu_period\x18\x01 \x01(\x03\x12\x11\n\tcpu_quota\x18\x02 \x01(\x03\x12\x12\n\ncp'
    b'u_shares\x18\x03 \x01(\x03\x12\x1d\n\x15memory_limit_in_bytes\x18\x04 \x01(\x03\x12\x13\n\x0bcpuset_cpus\x18\x06 \x01(\t\x12\x13\n\x0bcp'
    b'uset_mems\x18\x07 \x01(\t"E\n\x16ListContainersResponse\x12+\n\ncontainers\x18\x01 \x03(\x0b2\x17.kata_pin'
    b'.cri.Container"&\n\tContainer\x12\n\n\x02id\x18\x01 \x01(\t\x12\r\n\x05state\x18\x06 \x01(\x05b\x06proto3',
)

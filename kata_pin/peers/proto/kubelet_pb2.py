"""Messages of kubelet.proto: written by scripts/proto, do not edit."""

from kata_pin.peers.proto import define

define(
    __name__,
    b'\n\rkubelet.proto\x12\x10kata_pin.kubelet" \n\x10ListPodsResponse\x12\x0c\n\x04pods\x18\x01 \x03(\x0c"^\n\x03P'
    b"od\x12.\n\x08metadata\x18\x01 \x01(\x0b2\x1c.kata_pin.kubelet.ObjectMeta\x12'\n\x04spec\x18\x02 \x01(\x0b2\x19.kata_"
    b'pin.kubelet.PodSpec"\x91\x01\n\nObjectMeta\x12\x0b\n\x03uid\x18\x05 \x01(\t\x12B\n\x0bannotations\x18\x0c \x03(\x0b2-.k'
    b'ata_pin.kubelet.ObjectMeta.AnnotationsEntry\x1a2\n\x10AnnotationsEntry\x12\x0b\n\x03key\x18\x01'
    b' \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01"o\n\x07PodSpec\x124\n\x0finit_containers\x18\x14 \x03(\x0b2\x1b.kata_pin.k'
    b'ubelet.Container\x12.\n\tresources\x18( \x01(\x0b2\x1b.kata_pin.kubelet.Resources"1\n\tCont'
    b'ainer\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x16\n\x0erestart_policy\x18\x18 \x01(\t"\x99\x02\n\tResources\x127\n\x06limits\x18\x01 \x03('
    b"\x0b2'.kata_pin.kubelet.Resources.LimitsEntry\x12;\n\x08requests\x18\x02 \x03(\x0b2).kata_pin."
    b'kubelet.Resources.RequestsEntry\x1aI\n\x0bLimitsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12)\n\x05value\x18\x02 \x01'
    b'(\x0b2\x1a.kata_pin.kubelet.Quantity:\x028\x01\x1aK\n\rRequestsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12)\n\x05valu'
    b'e\x18\x02 \x01(\x0b2\x1a.kata_pin.kubelet.Quantity:\x028\x01"\n\n\x08Quantity"Q\n\x18ListPodResourcesR'
    b'esponse\x125\n\rpod_resources\x18\x01 \x03(\x0b2\x1e.kata_pin.kubelet.PodResources"z\n\x0cPodRes'
    b'ources\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x11\n\tnamespace\x18\x02 \x01(\t\x128\n\ncontainers\x18\x03 \x03(\x0b2$.kata_pin.k'
    b'ubelet.ContainerResources\x12\x0f\n\x07cpu_ids\x18\x04 \x03(\x03"3\n\x12ContainerResources\x12\x0c\n\x04name'
    b'\x18\x01 \x01(\t\x12\x0f\n\x07cpu_ids\x18\x03 \x03(\x03"/\n\x1cAllocatableResourcesResponse\x12\x0f\n\x07cpu_ids\x18\x02 \x03(\x03'
    b'b\x06proto3',
)

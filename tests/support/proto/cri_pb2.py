"""Messages of cri.proto: written by scripts/proto, do not edit."""

from kata_pin.peers.proto import define

define(
    __name__,
    b'\n\tcri.proto\x12\nruntime.v1"S\n\x12PodSandboxMetadata\x12\x0c\n\x04name\x18\x01 \x01(\t\x12\x0b\n\x03uid\x18\x02 \x01(\t'
    b'\x12\x11\n\tnamespace\x18\x03 \x01(\t\x12\x0f\n\x07attempt\x18\x04 \x01(\r"\x8d\x01\n\x0fNamespaceOption\x12*\n\x07network\x18\x01 \x01('
    b'\x0e2\x19.runtime.v1.NamespaceMode\x12&\n\x03pid\x18\x02 \x01(\x0e2\x19.runtime.v1.NamespaceMode\x12&\n\x03'
    b'ipc\x18\x03 \x01(\x0e2\x19.runtime.v1.NamespaceMode"U\n\x1bLinuxSandboxSecurityContext\x126\n\x11n'
    b'amespace_options\x18\x01 \x01(\x0b2\x1b.runtime.v1.NamespaceOption"q\n\x15LinuxPodSandboxCo'
    b"nfig\x12\x15\n\rcgroup_parent\x18\x01 \x01(\t\x12A\n\x10security_context\x18\x02 \x01(\x0b2'.runtime.v1.Linux"
    b'SandboxSecurityContext"\x85\x02\n\x10PodSandboxConfig\x120\n\x08metadata\x18\x01 \x01(\x0b2\x1e.runtime.'
    b'v1.PodSandboxMetadata\x12\x15\n\rlog_directory\x18\x03 \x01(\t\x12B\n\x0bannotations\x18\x07 \x03(\x0b2-.runt'
    b'ime.v1.PodSandboxConfig.AnnotationsEntry\x120\n\x05linux\x18\x08 \x01(\x0b2!.runtime.v1.Lin'
    b'uxPodSandboxConfig\x1a2\n\x10AnnotationsEntry\x12\x0b\n\x03key\x18\x01 \x01(\t\x12\r\n\x05value\x18\x02 \x01(\t:\x028\x01"]'
    b'\n\x14RunPodSandboxRequest\x12,\n\x06config\x18\x01 \x01(\x0b2\x1c.runtime.v1.PodSandboxConfig\x12\x17\n\x0f'
    b'runtime_handler\x18\x02 \x01(\t"/\n\x15RunPodSandboxResponse\x12\x16\n\x0epod_sandbox_id\x18\x01 \x01(\t"+'
    b'\n\x11PodSandboxRequest\x12\x16\n\x0epod_sandbox_id\x18\x01 \x01(\t"2\n\x11ContainerMetadata\x12\x0c\n\x04name'
    b'\x18\x01 \x01(\t\x12\x0f\n\x07attempt\x18\x02 \x01(\r"\x1a\n\tImageSpec\x12\r\n\x05image\x18\x01 \x01(\t"\x88\x01\n\x17LinuxContainerRe'
    b'sources\x12\x12\n\ncpu_period\x18\x01 \x01(\x03\x12\x11\n\tcpu_quota\x18\x02 \x01(\x03\x12\x12\n\ncpu_shares\x18\x03 \x01(\x03\x12\x1d\n\x15me'
    b'mory_limit_in_bytes\x18\x04 \x01(\x03\x12\x13\n\x0bcpuset_cpus\x18\x06 \x01(\t"N\n\x14LinuxContainerConfig\x126'
    b'\n\tresources\x18\x01 \x01(\x0b2#.runtime.v1.LinuxContainerResources"\xbc\x01\n\x0fContainerConf'
    b'ig\x12/\n\x08metadata\x18\x01 \x01(\x0b2\x1d.runtime.v1.ContainerMetadata\x12$\n\x05image\x18\x02 \x01(\x0b2\x15.run'
    b'time.v1.ImageSpec\x12\x0f\n\x07command\x18\x03 \x03(\t\x12\x10\n\x08log_path\x18\x0b \x01(\t\x12/\n\x05linux\x18\x0f \x01(\x0b2 .ru'
    b'ntime.v1.LinuxContainerConfig"\x93\x01\n\x16CreateContainerRequest\x12\x16\n\x0epod_sandbox_'
    b'id\x18\x01 \x01(\t\x12+\n\x06config\x18\x02 \x01(\x0b2\x1b.runtime.v1.ContainerConfig\x124\n\x0esandbox_config\x18'
    b'\x03 \x01(\x0b2\x1c.runtime.v1.PodSandboxConfig"/\n\x17CreateContainerResponse\x12\x14\n\x0ccontai'
    b'ner_id\x18\x01 \x01(\t"9\n\x10ContainerRequest\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t\x12\x0f\n\x07timeout\x18\x02 \x01(\x03"'
    b'k\n\x1fUpdateContainerResourcesRequest\x12\x14\n\x0ccontainer_id\x18\x01 \x01(\t\x122\n\x05linux\x18\x02 \x01(\x0b2'
    b'#.runtime.v1.LinuxContainerResources"\x07\n\x05Empty*1\n\rNamespaceMode\x12\x07\n\x03POD\x10\x00\x12'
    b'\r\n\tCONTAINER\x10\x01\x12\x08\n\x04NODE\x10\x02b\x06proto3',
)

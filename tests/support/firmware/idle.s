# Firmware for a guest that does nothing: 64 KiB for QEMU's -bios, q35 machine, KVM or TCG.
#
# It halts. Asked by a non-maskable interrupt (QMP inject-nmi), it ejects the vCPUs that QEMU was
# told to unplug (device_del), as a guest's ACPI code would, and halts again: an idle VM costs no
# CPU time. Interrupts other than NMI stay off, so no timer and no interrupt controller is needed.
#
# It stays in 16-bit mode because an emulating KVM (one that cannot run the guest's kernel mode on
# the CPU) knows IRET in real mode only. Only the boot vCPU runs this; all others wait for a SIPI.
#
# Ejecting: docs/specs/acpi_cpu_hotplug in QEMU. Port 0xcd8 selects a vCPU by its slot (32 bits; the
# first write of 0 leaves the legacy interface), port 0xcdc holds its flags:
#   read   bit 1: was inserted, bit 2: removal was requested
#   write  bit 1: clear the insert event, bit 2: clear the request, bit 3: eject it now

        .set    lapic,          0xfee00000      # local APIC, memory mapped at reset
        .set    lapic_spurious, 0xf0            # spurious vector register; bit 8 enables the APIC
        .set    lapic_lint1,    0x360           # LINT1, the pin that carries NMI
        .set    select,         0xcd8
        .set    flags,          0xcdc
        .set    slots,          256             # as many as the APIC ids of 8 bits allow
        .set    stack,          0x7000

        .code16
start:
        cli
        # The APIC lies above 1 MiB: borrow a flat data segment from protected mode for two writes.
        lgdtl   %cs:gdt_register
        movl    %cr0, %eax
        orb     $1, %al
        movl    %eax, %cr0
        movw    $8, %bx
        movw    %bx, %ds
        movl    $lapic, %edi
        movl    $0x1ff, lapic_spurious(%edi)
        movl    $0x400, lapic_lint1(%edi)       # delivery mode NMI, not masked
        andb    $0xfe, %al
        movl    %eax, %cr0

        xorw    %bx, %bx
        movw    %bx, %ds
        movw    %bx, %ss
        movw    $stack, %sp
        movw    $nmi, 8                         # interrupt vector 2
        movw    %cs, 10
        xorl    %eax, %eax
        movw    $select, %dx
        outl    %eax, %dx

idle:
        hlt
        jmp     idle

# An NMI does not resume what it interrupted: it continues at eject. So none can be lost between a
# scan and the next halt.
nmi:
        movw    %sp, %bp
        movw    $eject, (%bp)
        iretw

eject:
        movw    $stack, %sp
        # QEMU still walks its list of vCPUs to deliver this very NMI, and would wait for ever for one
        # ejected under its feet: let some milliseconds of port reads pass first.
        movw    $1000, %cx
1:      inb     $0x80, %al
        loop    1b

        xorl    %ecx, %ecx
each:
        movl    %ecx, %eax
        movw    $select, %dx
        outl    %eax, %dx
        movw    $flags, %dx
        inb     %dx, %al
        testb   $2, %al
        jz      1f
        movb    $2, %al
        outb    %al, %dx
1:      inb     %dx, %al
        testb   $4, %al
        jz      2f
        # Eject alone leaves the request standing, for whatever is plugged into this slot later.
        movb    $4, %al
        outb    %al, %dx
        movb    $8, %al
        outb    %al, %dx
2:      incl    %ecx
        cmpl    $slots, %ecx
        jb      each
        jmp     idle

        .balign 8
gdt:    .quad   0
        .quad   0x00cf93000000ffff              # flat data, 4 GiB
gdt_register:
        .word   15
        .long   0xf0000 + gdt

        .org    0xfff0                          # where a CPU starts after reset
        jmp     start
        .org    0x10000

# A vsock listener for the test guest: port 1024, where Kata's agent would answer. For each
# connection it runs /bin/answer with the connection as stdin and stdout.
#
# Who starts it ignores SIGCHLD, which execve(2) keeps: children need not be waited for.
# Linux x86-64: system call number in rax, arguments in rdi, rsi, rdx, r10.

        .set    AF_VSOCK, 40
        .set    SOCK_STREAM, 1
        .set    port, 1024

        .set    SYS_close, 3
        .set    SYS_dup2, 33
        .set    SYS_socket, 41
        .set    SYS_accept, 43
        .set    SYS_bind, 49
        .set    SYS_listen, 50
        .set    SYS_fork, 57
        .set    SYS_execve, 59
        .set    SYS_exit, 60

        .globl  _start
        .text
_start:
        movl    $SYS_socket, %eax
        movl    $AF_VSOCK, %edi
        movl    $SOCK_STREAM, %esi
        xorl    %edx, %edx
        syscall
        testl   %eax, %eax
        js      fail
        movl    %eax, %ebx                      # the listener

        movl    $SYS_bind, %eax
        movl    %ebx, %edi
        leaq    address(%rip), %rsi
        movl    $16, %edx
        syscall
        testl   %eax, %eax
        js      fail

        movl    $SYS_listen, %eax
        movl    %ebx, %edi
        movl    $16, %esi
        syscall
        testl   %eax, %eax
        js      fail

next:   movl    $SYS_accept, %eax
        movl    %ebx, %edi
        xorl    %esi, %esi
        xorl    %edx, %edx
        syscall
        testl   %eax, %eax
        js      next
        movl    %eax, %ebp                      # the connection

        movl    $SYS_fork, %eax
        syscall
        testl   %eax, %eax
        jz      child
        movl    $SYS_close, %eax
        movl    %ebp, %edi
        syscall
        jmp     next

child:  movl    $SYS_dup2, %eax
        movl    %ebp, %edi
        xorl    %esi, %esi
        syscall
        movl    $SYS_dup2, %eax
        movl    %ebp, %edi
        movl    $1, %esi
        syscall
        movl    $SYS_close, %eax
        movl    %ebp, %edi
        syscall
        movl    $SYS_execve, %eax
        leaq    program(%rip), %rdi
        leaq    arguments(%rip), %rsi
        xorl    %edx, %edx
        syscall

fail:   movl    $SYS_exit, %eax
        movl    $1, %edi
        syscall

        .data
        .balign 8
address:                                        # struct sockaddr_vm, linux/vm_sockets.h
        .word   AF_VSOCK, 0
        .long   port
        .long   0xffffffff                      # VMADDR_CID_ANY
        .long   0
arguments:
        .quad   program, 0
program:
        .asciz  "/bin/answer"

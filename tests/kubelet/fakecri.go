// Serves Kubernetes' own fake container runtime on a Unix socket, for a kubelet without containers.
package main

import (
	"fmt"
	"os"

	"k8s.io/cri-client/pkg/fake"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: fakecri SOCKET IMAGE")
		os.Exit(2)
	}
	runtime := fake.NewFakeRemoteRuntime()
	runtime.ImageService.SetFakeImages([]string{os.Args[2]})
	if err := runtime.Start("unix://" + os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "fakecri:", err)
		os.Exit(1)
	}
	select {}
}

// A runtime's side of NRI 0.12, by containerd's own library: what containerd 2.3 is built on.
//
// nriadaptation SOCKET PODS: listens on SOCKET and tells a plugin of that many pods, each with a
// container and 4 KiB of annotations. Then, for each line "EVENT POD CONTAINER CPUS" of stdin,
// calls the plugins. A line of stdout says how each call ended: "ok MILLISECONDS" or "error TEXT";
// "synchronized" comes when a plugin has been told everything.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
)

func pod(name string) *api.PodSandbox {
	note := strings.Repeat("x", 4096)
	return &api.PodSandbox{
		Id: name, Name: name, Uid: "uid-" + name, Namespace: "shop", RuntimeHandler: "kata",
		Annotations: map[string]string{"note": note},
	}
}

func container(of, name, cpus string) *api.Container {
	cpu := &api.LinuxCPU{Cpus: cpus}
	return &api.Container{
		Id: name, PodSandboxId: of, Name: name, State: api.ContainerState_CONTAINER_RUNNING,
		Linux: &api.LinuxContainer{Resources: &api.LinuxResources{Cpu: cpu}},
	}
}

func call(r *adaptation.Adaptation, event string, p *api.PodSandbox, c *api.Container) error {
	ctx := context.Background()
	switch event {
	case "RunPodSandbox":
		return r.RunPodSandbox(ctx, &api.RunPodSandboxRequest{Pod: p})
	case "StopPodSandbox":
		return r.StopPodSandbox(ctx, &api.StopPodSandboxRequest{Pod: p})
	case "RemovePodSandbox":
		return r.RemovePodSandbox(ctx, &api.RemovePodSandboxRequest{Pod: p})
	case "CreateContainer":
		_, err := r.CreateContainer(ctx, &api.CreateContainerRequest{Pod: p, Container: c})
		return err
	case "StartContainer":
		return r.StartContainer(ctx, &api.StartContainerRequest{Pod: p, Container: c})
	case "PostStartContainer":
		return r.PostStartContainer(ctx, &api.PostStartContainerRequest{Pod: p, Container: c})
	case "UpdateContainer":
		_, err := r.UpdateContainer(ctx, &api.UpdateContainerRequest{Pod: p, Container: c})
		return err
	case "PostUpdateContainer":
		return r.PostUpdateContainer(ctx, &api.PostUpdateContainerRequest{Pod: p, Container: c})
	case "StopContainer":
		_, err := r.StopContainer(ctx, &api.StopContainerRequest{Pod: p, Container: c})
		return err
	case "RemoveContainer":
		return r.RemoveContainer(ctx, &api.RemoveContainerRequest{Pod: p, Container: c})
	}
	return fmt.Errorf("no event %q", event)
}

func main() {
	count, err := strconv.Atoi(os.Args[2])
	if err != nil {
		panic(err)
	}
	var listening atomic.Bool
	synchronize := func(ctx context.Context, tell adaptation.SyncCB) error {
		var pods []*api.PodSandbox
		var containers []*api.Container
		for n := range count {
			name := fmt.Sprintf("pod%d", n)
			pods = append(pods, pod(name))
			containers = append(containers, container(name, "of-"+name, "0"))
		}
		updates, err := tell(ctx, pods, containers)
		if !listening.Load() {
			return err // at the start nobody is registered
		}
		if err == nil && len(updates) == 0 {
			fmt.Println("synchronized")
		} else {
			fmt.Println("error", err, updates)
		}
		return err
	}
	update := func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) {
		fmt.Println("error: an observer updated a container")
		return nil, nil
	}
	runtime, err := adaptation.New("containerd", "v2.3.0", synchronize, update,
		adaptation.WithSocketPath(os.Args[1]), adaptation.WithPluginPath("/nonexistent"))
	if err != nil {
		panic(err)
	}
	if err := runtime.Start(); err != nil {
		panic(err)
	}
	listening.Store(true)
	fmt.Println("listening")
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		words := append(strings.Fields(lines.Text()), "", "", "")
		start := time.Now()
		err := call(runtime, words[0], pod(words[1]), container(words[1], words[2], words[3]))
		if err != nil {
			fmt.Println("error", err)
		} else {
			fmt.Println("ok", time.Since(start).Milliseconds())
		}
	}
	runtime.Stop()
}

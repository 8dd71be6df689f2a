{{- define "kata-pin.labels" -}}
app.kubernetes.io/name: kata-pin
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kata-pin.selector" -}}
app.kubernetes.io/name: kata-pin
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: node
{{- end }}

{{- define "kata-pin.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{- /* rights that no container but the daemon's has */ -}}
{{- define "kata-pin.norights" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65531
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* whether the reporter's address is one that only its own network namespace reaches */ -}}
{{- define "kata-pin.loopback" -}}
{{- if or (hasPrefix "127." .Values.reporter.address) (eq "::1" .Values.reporter.address) }}yes{{ end -}}
{{- end }}

{{- /* Where the kubelet asks: without a host at the pod's address, which with hostNetwork is the node's. It
expands no variable there. */ -}}
{{- define "kata-pin.probed" -}}
port: {{ .Values.reporter.port }}
{{- if include "kata-pin.loopback" . }}, host: {{ .Values.reporter.address | quote }}{{ end }}
{{- end }}

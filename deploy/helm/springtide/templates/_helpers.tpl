{{- define "springtide.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What all pods of the release have in common, and no other pod. */}}
{{- define "springtide.releaseLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Of one part: (dict "root" $ "component" "gateway"). */}}
{{- define "springtide.selectorLabels" -}}
{{ include "springtide.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "springtide.labels" -}}
{{ include "springtide.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "springtide.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ default (printf "%s-%s" $.Chart.AppVersion .variant) .tag }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "springtide.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "springtide.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "springtide.secretName" -}}
{{ default (printf "%s-cluster" (include "springtide.fullname" .)) .Values.secret.existingSecret }}
{{- end -}}

{{- define "springtide.scheme" -}}
{{ ternary "HTTPS" "HTTP" (ne .Values.gateway.tls.existingSecret "") }}
{{- end -}}

{{- define "springtide.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The beginning of a pod's spec: (dict "root" $ "component" "gateway" "values" .Values.gateway). */}}
{{- define "springtide.podBeginning" -}}
serviceAccountName: {{ include "springtide.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- if .values.topologySpreadConstraints }}
{{ toYaml .values.topologySpreadConstraints | indent 2 }}
{{- else }}
{{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ $key }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "springtide.selectorLabels" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "springtide.podMetadata" -}}
labels:
  {{- include "springtide.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  {{- if eq .component "valkey" }}
  checksum/scripts: {{ (.root.Files.Glob "files/{valkey*,certificates}.py").AsConfig | sha256sum }}
  {{- else }}
  # What pods have read at their start is other when this is: they are replaced, but for those of a RayCluster.
  checksum/configuration: {{ printf "%s%s" (include "springtide.config" (dict "root" .root "head" (eq .component "head"))) ((.root.Files.Glob "files/*.py").AsConfig) | sha256sum }}
  {{- end }}
  {{- with .root.Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Service links are off: their variables would be taken for settings. */}}
{{- define "springtide.podEnvironment" -}}
- {name: HOME, value: /tmp}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end -}}

{{/* Of every container that runs Springtide. */}}
{{- define "springtide.environment" -}}
{{ include "springtide.podEnvironment" . }}
- name: SPRINGTIDE_CLUSTER_SECRET
  valueFrom: {secretKeyRef: {name: {{ include "springtide.secretName" . }}, key: cluster-secret}}
{{- end -}}

{{/* Stays, and makes another certificate long before one expires, and when the authority is another; what it is made with is seen by nobody
else in the pod. (dict "root" $), and "name" where the pod is called by another than its own. */}}
{{- define "springtide.certificates" -}}
{{- $names := ternary (list "$(POD_IP)" .name) (list "$(POD_IP)") (hasKey . "name") -}}
{{- with .root -}}
- name: certificates
  image: {{ include "springtide.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  restartPolicy: Always
  command: {{ concat (list "tini" "--" "python" "/etc/springtide/scripts/certificates.py" "/etc/springtide/authority" "/run/springtide/tls" (toString .Values.tls.renewSeconds) "$(POD_NAME)") $names | toJson }}
  env: {{ include "springtide.environment" . | nindent 4 }}
  startupProbe:
    exec: {command: ["test", "-e", "/run/springtide/tls/tls.crt"]}
    periodSeconds: 1
    failureThreshold: 120
  resources: {{ toYaml .Values.smallResources | nindent 4 }}
  securityContext: {{ include "springtide.containerSecurityContext" . | nindent 4 }}
  volumeMounts:
    - {name: authority, mountPath: /etc/springtide/authority, readOnly: true}
    - {name: scripts, mountPath: /etc/springtide/scripts, readOnly: true}
    - {name: run, mountPath: /run/springtide}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}

{{- define "springtide.authorityVolume" -}}
- name: authority
  secret: {secretName: {{ default (printf "%s-authority" (include "springtide.fullname" .)) .Values.tls.existingAuthority }}, defaultMode: 0440}
{{- end -}}

{{/* Of the container that others reach, with its port. */}}
{{- define "springtide.valkeyProbes" -}}
ports:
  - {name: valkey, containerPort: 6379}
startupProbe:
  tcpSocket: {port: valkey}
  periodSeconds: 1
  failureThreshold: 120
readinessProbe:
  tcpSocket: {port: valkey}
  periodSeconds: 5
livenessProbe:
  tcpSocket: {port: valkey}
  periodSeconds: 10
{{- end -}}

{{- define "springtide.valkeyHost" -}}
{{ include "springtide.fullname" . }}-valkey.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{/* What runs before a pod's processes do: whoever fetches the model, whoever writes the configuration, whoever has certificates made:
(dict "root" $ "drainSeconds" 30), which is how long they have to end what they have; "settings": the file of the ConfigMap, where it is not
config.yaml; "pool": the values of the pool that they are of. */}}
{{- define "springtide.initContainers" -}}
{{- $drainSeconds := .drainSeconds -}}
{{- $settings := default "config.yaml" .settings -}}
{{- $pool := .pool -}}
{{- with .root -}}
{{- $root := . -}}
{{- with .Values.model.download }}
{{- if .enabled }}
- name: model
  image: {{ .image | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- with .command }}
  command: {{ toJson . }}
  {{- end }}
  {{- with .args }}
  args: {{ toJson . }}
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    {{- with .env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with .envFromSecrets }}
  envFrom:
    {{- range . }}
    - secretRef: {name: {{ . }}}
    {{- end }}
  {{- end }}
  resources: {{ toYaml .resources | nindent 4 }}
  securityContext: {{ include "springtide.containerSecurityContext" $root | nindent 4 }}
  volumeMounts:
    - {name: model, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
- name: configuration
  image: {{ include "springtide.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: ["python", "/etc/springtide/scripts/configure.py", "/etc/springtide/config.yaml", "/run/springtide"]
  env:
    {{- include "springtide.environment" . | nindent 4 }}
    {{- if .Values.valkey.enabled }}
    - {name: VALKEY_HOST, value: {{ include "springtide.valkeyHost" . }}}
    - name: VALKEY_PASSWORD
      valueFrom: {secretKeyRef: {name: {{ include "springtide.secretName" . }}, key: valkey-password}}
    {{- else }}
    - name: SPRINGTIDE_REDIS_URL
      valueFrom: {secretKeyRef: {name: {{ include "springtide.secretName" . }}, key: valkey-url}}
    {{- end }}
    - {name: SPRINGTIDE_DRAIN_S, value: {{ $drainSeconds | quote }}}
    {{- with $pool }}
    {{- include "springtide.poolEnvironment" . | nindent 4 }}
    {{- end }}
  resources: {{ toYaml .Values.smallResources | nindent 4 }}
  securityContext: {{ include "springtide.containerSecurityContext" . | nindent 4 }}
  volumeMounts:
    - {name: config, mountPath: /etc/springtide/config.yaml, subPath: {{ $settings }}, readOnly: true}
    - {name: scripts, mountPath: /etc/springtide/scripts, readOnly: true}
    - {name: run, mountPath: /run/springtide}
    - {name: tmp, mountPath: /tmp}
    {{- include "springtide.modelMount" . | nindent 4 }}
{{- if .Values.tls.enabled }}
{{ include "springtide.certificates" (dict "root" .) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of a container that serves the APIs. */}}
{{- define "springtide.apiProbes" -}}
{{- $scheme := include "springtide.scheme" . -}}
{{- if .Values.gateway.tls.clientCa }}
# Only clients with a certificate are answered, and the kubelet has none.
startupProbe:
  tcpSocket: {port: http}
  periodSeconds: 2
  failureThreshold: 300
readinessProbe:
  tcpSocket: {port: http}
  periodSeconds: 5
  failureThreshold: 3
{{ include "springtide.livenessProbe" (dict "module" "gateway") }}
{{- else }}
startupProbe:
  httpGet: {path: /health, port: http, scheme: {{ $scheme }}}
  periodSeconds: 2
  failureThreshold: 300
readinessProbe:
  httpGet: {path: /ready, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  # A minute: for so long requests wait in a gateway for a Conductor, and need not be sent elsewhere.
  failureThreshold: 12
livenessProbe:
  {{- if eq $scheme "HTTPS" }}
  httpGet: {path: /health, port: http, scheme: HTTPS}
  {{- else }}
  grpc: {port: 8001}
  {{- end }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}
{{- end -}}

{{- define "springtide.gatewayMounts" -}}
{{- if .Values.gateway.tls.existingSecret }}
- {name: tls, mountPath: /etc/springtide/tls, readOnly: true}
{{- end }}
{{- if .Values.gateway.files }}
- {name: files, mountPath: /files}
{{- end }}
{{- end -}}

{{- define "springtide.gatewayVolumes" -}}
{{- with .Values.gateway.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- with .Values.gateway.files }}
- name: files
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "springtide.modelMount" -}}
{{- if or .Values.model.volume .Values.model.download.enabled }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{/* Of every container that runs Springtide's processes, or asks whether they are there, beside a /tmp. */}}
{{- define "springtide.runMounts" -}}
- {name: run, mountPath: /run/springtide}
- {name: scripts, mountPath: /etc/springtide/scripts, readOnly: true}
{{- if .Values.valkey.certificates }}
- {name: valkey-certificates, mountPath: /etc/springtide/valkey, readOnly: true}
{{- end }}
{{- end -}}

{{- define "springtide.processMounts" -}}
{{ include "springtide.runMounts" . }}
- {name: tmp, mountPath: /tmp}
{{- end -}}

{{/* Of a pool's nodes: what they have beside the cluster's settings. */}}
{{- define "springtide.poolEnvironment" -}}
- {name: SPRINGTIDE_PREFILL_NODE__THREADS, value: {{ .threads | quote }}}
- {name: SPRINGTIDE_DECODE_NODE__THREADS, value: {{ .threads | quote }}}
{{- if .ssd.enabled }}
- {name: SPRINGTIDE_KV__SSD_DIR, value: /ssd}
{{- end }}
{{- with .hugepages.size }}
- {name: SPRINGTIDE_KV__HUGEPAGES, value: {{ . }}B}
{{- end }}
{{- end -}}

{{- define "springtide.storeMounts" -}}
{{- if .ssd.enabled }}
- {name: ssd, mountPath: /ssd}
{{- end }}
{{- end -}}

{{/* Of a pool's pods, beside those of all: (dict "root" $ "component" "prefill" "values" .Values.prefill). */}}
{{- define "springtide.poolVolumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .values.shmSize }}}
{{- if and .values.ssd.enabled (eq .values.kind "Deployment") }}
- name: ssd
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels: {{ include "springtide.selectorLabels" . | nindent 10 }}
      spec: {{ include "springtide.claim" .values.ssd | nindent 8 }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "component" "gateway" "name" … "budget" (dict "maxUnavailable" 1)). */}}
{{- define "springtide.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{ include "springtide.labels" . | nindent 4 }}
spec:
  {{- toYaml .budget | nindent 2 }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{ include "springtide.selectorLabels" . | nindent 6 }}
{{- end -}}

{{- define "springtide.commonVolumes" -}}
- name: config
  configMap: {name: {{ include "springtide.fullname" . }}}
- name: scripts
  configMap: {name: {{ include "springtide.fullname" . }}-scripts}
# Sockets by which the pod's processes speak, what they are configured with, certificates.
- name: run
  emptyDir: {sizeLimit: 64Mi}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if .Values.tls.enabled }}
{{ include "springtide.authorityVolume" . }}
{{- end }}
{{- with .Values.valkey.certificates }}
- name: valkey-certificates
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- if .Values.model.download.enabled }}
- name: model
  emptyDir: {sizeLimit: {{ .Values.model.download.sizeLimit }}}
{{- else if .Values.model.volume }}
- name: model
  {{- toYaml .Values.model.volume | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The cluster's settings: the user's, and those that follow from how the chart lays things out: (dict "root" $ "head" true) for the head of
mode ray, whose gateway serves itself alone, and whose Conductor is one of several. */}}
{{- define "springtide.config" -}}
{{- $head := .head -}}
{{- with .root -}}
{{- $own := dict
  "model" .Values.model.path
  "cluster" (include "springtide.fullname" .)
  "server" (dict "host" (ternary "127.0.0.1" "0.0.0.0" $head) "port" 8000 "grpc_port" 8001 "separate_gateway" true)
  "conductor" (dict "replicas" (ternary 1 (int .Values.conductor.replicas) $head))
  "tls" (ternary (dict "certificate" "/run/springtide/tls/tls.crt" "key" "/run/springtide/tls/tls.key" "ca" "/run/springtide/tls/ca.crt") (dict "plaintext_allowed" true) .Values.tls.enabled)
}}
{{- with .Values.model.servedName }}{{ $_ := set $own "served_model_name" . }}{{ end }}
{{- if eq .Values.mode "ray" }}{{ $_ := set $own "join_port" 8002 }}{{ end }}
{{- if $head }}
  {{- $ray := dict "address" "auto" }}
  {{- range $role := include "springtide.pools" $.root | fromJsonArray }}
    {{- $pool := index $.root.Values $role }}
    {{- $wanted := dict "gpus" (int $pool.gpu.count) "resources" (dict (printf "springtide-%s" $role) 1) }}
    {{- if $pool.autoscaling.enabled }}{{ $_ := set $wanted "most" (int $pool.autoscaling.maxReplicas) }}{{ end }}
    {{- $_ := set $ray $role $wanted }}
    {{- $_ := set $own (ternary "instances" $role (eq $role "instance")) (include "springtide.leastReplicas" (dict "root" $.root "role" $role) | int) }}
  {{- end }}
  {{- $_ := set $own "ray" $ray }}
  {{- $_ := set $own "metrics_port" 9400 }}
{{- else }}
  {{- if .Values.gateway.tls.existingSecret }}
    {{- $_ := set $own.server "tls_certificate" "/etc/springtide/tls/tls.crt" }}
    {{- $_ := set $own.server "tls_key" "/etc/springtide/tls/tls.key" }}
    {{- if .Values.gateway.tls.clientCa }}
      {{- $_ := set $own.server "tls_client_ca" "/etc/springtide/tls/ca.crt" }}
    {{- end }}
  {{- end }}
  {{- if .Values.gateway.files }}{{ $_ := set $own.server "files_dir" "/files" }}{{ end }}
{{- end }}
{{- mustMergeOverwrite (deepCopy .Values.config) $own | toYaml }}
{{- end -}}
{{- end -}}

{{/* The pools that have pods, a list of their roles. */}}
{{- define "springtide.pools" -}}
{{- $pools := list }}
{{- range $role := list "instance" "prefill" "decode" }}
{{- if include "springtide.leastReplicas" (dict "root" $ "role" $role) | int }}{{ $pools = append $pools $role }}{{ end }}
{{- end }}
{{- if not (or (has "instance" $pools) (and (has "prefill" $pools) (has "decode" $pools))) }}
{{- fail "prefill.replicas, decode.replicas: without instances a cluster has one pod of each at least" }}
{{- end }}
{{- toJson $pools }}
{{- end -}}

{{/* The fewest pods of a pool: (dict "root" $ "role" "prefill"). */}}
{{- define "springtide.leastReplicas" -}}
{{- $pool := index .root.Values .role -}}
{{- if $pool.autoscaling.enabled -}}
{{ $pool.autoscaling.minReplicas }}
{{- else if ne (toString $pool.replicas) "" -}}
{{ $pool.replicas }}
{{- else -}}
{{ ternary 0 1 (gt (include "springtide.leastReplicas" (dict "root" .root "role" "instance") | int) 0) }}
{{- end -}}
{{- end -}}

{{/* Of a container, with what device plugins give it: (dict "resources" … "devices" …). */}}
{{- define "springtide.resources" -}}
requests: {{ merge (dict) .resources.requests .devices | toYaml | nindent 2 }}
limits: {{ merge (dict) .resources.limits .devices | toYaml | nindent 2 }}
{{- end -}}

{{/* What several parts in one container request, or are limited to: (list …), of maps. What one of them has no bound of, there is none of. */}}
{{- define "springtide.sum" -}}
{{- $parts := . -}}
{{- range $name, $_ := first $parts }}
{{- $thousandths := 0 }}
{{- $bounded := true }}
{{- range $part := $parts }}
{{- if hasKey $part $name }}
{{- $text := index $part $name | toString }}
{{- $unit := regexFind "[a-zA-Z]*$" $text }}
{{- $units := dict "m" 1 "" 1000 "k" 1e6 "M" 1e9 "G" 1e12 "T" 1e15 "P" 1e18 "Ki" 1024e3 "Mi" 1048576e3 "Gi" 1073741824e3 "Ti" 1099511627776e3 "Pi" 1125899906842624e3 }}
{{- $thousandths = add $thousandths (mulf (trimSuffix $unit $text | float64) (index $units $unit) | int64) }}
{{- else }}
{{- $bounded = false }}
{{- end }}
{{- end }}
{{- if not $bounded }}
{{- else if eq $name "cpu" }}
{{ $name }}: {{ $thousandths }}m
{{- else if contains "/" $name }}
{{ $name }}: {{ div $thousandths 1000 }}
{{- else }}
{{ $name }}: {{ div (add $thousandths 1048575999) 1048576000 }}Mi
{{- end }}
{{- end }}
{{- end -}}

{{- define "springtide.gpuDevices" -}}
{{- if .gpu.count }}
{{ .gpu.resource }}: {{ .gpu.count }}
{{- end }}
{{- end -}}

{{/* Of the store, which moves the bytes. */}}
{{- define "springtide.rdmaDevices" -}}
{{- if .rdma.enabled }}
{{ .rdma.resource }}: {{ .rdma.count }}
{{- end }}
{{- if .hugepages.size }}
hugepages-{{ .hugepages.size }}: {{ .hugepages.amount }}
{{- end }}
{{- end -}}

{{- define "springtide.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end -}}

{{/* What a pool is scaled by: a list of names, PromQL queries, thresholds and how the two are compared. AverageValue: as many pods as the
value has thresholds. Value: as many times the pods. Instances have the work of both roles, and follow the larger one. Of several Conductors
the one that leads is asked. */}}
{{- define "springtide.triggers" -}}
{{- $scaling := .pool.autoscaling -}}
{{- $pods := printf "namespace=%q,job=%q" .root.Release.Namespace (printf "%s/%s" .root.Release.Namespace (include "springtide.fullname" .root)) -}}
{{- $role := printf "%s,%s" (ternary "role=~\"prefill|decode\"" (printf "role=%q" .role) (eq .role "instance")) $pods -}}
{{- $leads := printf "and on (pod) springtide_conductor_is_leader{%s} == 1" $pods -}}
- name: load
  type: Value
  threshold: {{ $scaling.targetLoad | quote }}
  query: max(springtide_conductor_pool_load{ {{- $role -}} } {{ $leads }})
{{- if and $scaling.followRatio (not (has "instance" (include "springtide.pools" .root | fromJsonArray))) }}
# Before anybody has asked a Conductor it wants no number of them. Where instances do what is there to do, no number follows from that.
- name: ratio
  type: AverageValue
  threshold: "1"
  query: max(springtide_conductor_pool_wanted{ {{- $role -}} } {{ $leads }}) or 0 * max(springtide_conductor_instances{ {{- $role -}} } {{ $leads }})
{{- end }}
{{- if $scaling.queuedTokens }}
- name: queue
  type: AverageValue
  threshold: {{ $scaling.queuedTokens | quote }}
  query: max(springtide_conductor_queued_prefill_tokens{ {{- $pods -}} } {{ $leads }})
{{- end }}
{{- if $scaling.targetKvUse }}
- name: kv
  type: Value
  threshold: {{ $scaling.targetKvUse | quote }}
  query: max(springtide_conductor_kv_used_ratio{ {{- $role -}} } {{ $leads }})
{{- end }}
{{- if $scaling.latencySeconds }}
{{- $seconds := printf "springtide_%s_seconds" (ternary "gateway_tbt" "conductor_predicted_ttft" (eq .role "decode")) }}
# A quantile of nothing is no number, which KEDA may take for a large negative one (kedacore/keda#7475): where nobody asks it is 0.
- name: latency
  type: Value
  threshold: {{ $scaling.latencySeconds | quote }}
  query: histogram_quantile(0.9, sum by (le) (rate({{ $seconds }}_bucket{ {{- $pods -}} }[2m]))) >= 0 or 0 * sum(rate({{ $seconds }}_count{ {{- $pods -}} }[2m]))
{{- end }}
{{- end -}}

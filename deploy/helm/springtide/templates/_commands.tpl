{{/* The command line of a process: (dict "module" "kvstore" "metricsPort" 9401 "arguments" (list "--node-id" "$(POD_NAME)")). */}}
{{- define "springtide.process" -}}
{{ concat (list "tini" "--" "python" "-P" "-m" .module "--config" "/run/springtide/config.yaml" "--model-info" "/run/springtide/model.json" "--run-dir" "/run/springtide" "--bind-host" "$(POD_IP)" "--metrics-port" (toString .metricsPort) "--beat-file" (include "springtide.beatFile" .)) .arguments | toJson }}
{{- end -}}

{{- define "springtide.beatFile" -}}
/run/springtide/{{ .module }}.beat
{{- end -}}

{{/* Of a process that may be away for others, who wait for it, while it does not hang: (dict "module" "kvstore"). */}}
{{- define "springtide.livenessProbe" -}}
livenessProbe:
  exec: {command: ["sh", "-c", "test $(($(date +%s) - $(stat -c %Y {{ include "springtide.beatFile" . }}))) -lt 30"]}
  periodSeconds: 20
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/* Whether others have heard of a process of this pod: (dict "role" "store"). */}}
{{- define "springtide.announced" -}}
["python", "/etc/springtide/scripts/announced.py", "/run/springtide/config.yaml", "{{ .role }}"]
{{- end -}}

{{/* The command line of a process: (dict "module" "kvstore" "metricsPort" 9401 "arguments" (list "--node-id" "$(POD_NAME)")). */}}
{{- define "springtide.process" -}}
{{ concat (list "tini" "--" "python" "-P" "-m" .module "--config" "/run/springtide/config.yaml" "--model-info" "/run/springtide/model.json" "--run-dir" "/run/springtide" "--bind-host" "$(POD_IP)" "--metrics-port" (toString .metricsPort)) .arguments | toJson }}
{{- end -}}

{{/* Whether others have heard of a process of this pod: (dict "role" "store"). */}}
{{- define "springtide.announced" -}}
["python", "/etc/springtide/scripts/announced.py", "/run/springtide/config.yaml", "{{ .role }}"]
{{- end -}}

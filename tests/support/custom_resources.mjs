// Checks custom resources against their schemas: objects as JSON on standard input; on standard output, for each of them, what is wrong with
// it, null where nothing is, or "unknown kind".
import { createRequire } from "node:module";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const [directory] = process.argv.slice(2);
const require = createRequire(`${directory}/`);
const PACKAGES = {
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

// Kinds that the package has in an older version alone, whose fields are the same.
const AS = { "gateway.networking.k8s.io/v1/GRPCRoute": "v1alpha2" };

// These schemas let unknown fields pass; the types beside them name all that there are, wherever they may stand.
function unknownField(spec, types) {
  const known = new Set(["matchLabels", "matchExpressions", "key", "operator", "values", ...[...types.matchAll(/"?(\w+)"?\??:/g)].map((match) => match[1])]);
  const look = (value) => {
    if (Array.isArray(value)) return value.map(look).find(Boolean);
    if (value === null || typeof value !== "object") return undefined;
    for (const [name, inner] of Object.entries(value)) {
      if (!known.has(name)) return name;
      // Whose names are free.
      const found = ["matchLabels", "metadata", "labels", "annotations"].includes(name) ? undefined : look(inner);
      if (found) return found;
    }
    return undefined;
  };
  return look(spec);
}

function problem(given) {
  const version = AS[`${given.apiVersion}/${given.kind}`] ?? given.apiVersion.split("/")[1];
  const [group] = given.apiVersion.split("/");
  const object = { ...given, apiVersion: `${group}/${version}` };
  const folder = PACKAGES[group];
  if (!folder) return "unknown kind";
  let Kind, types;
  try {
    const path = join(directory, "node_modules/@kubernetes-models", folder, group, version);
    Kind = require(join(path, `${object.kind}.js`))[object.kind];
    const described = readdirSync(path).filter((name) => name.endsWith(".d.ts"));
    types = described.map((name) => readFileSync(join(path, name), "utf8")).join("\n");
  } catch {
    return "unknown kind";
  }
  try {
    new Kind(object).validate();
    const name = unknownField(object.spec, types);
    return name ? `${name}: there is no such field` : null;
  } catch (error) {
    return error.message;
  }
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(problem)));

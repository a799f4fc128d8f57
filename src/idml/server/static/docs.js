// The documentation of the API, made from the service's own openapi.json.
import { at, make } from "./dom.js";

/** The text of a docstring without its marks. */
const plain = (words) => words.replaceAll("``", "").replace(/\*([^*]+)\*/g, "“$1”");

const cell = (...children) => make("td", {}, ...children);

/** A table with a header, or nothing if it has no rows. */
function table(heads, rows) {
  if (!rows.length) return null;
  const head = make("tr", {}, ...heads.map((words) => make("th", { scope: "col" }, words)));
  return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

/** The schema that a reference names. */
const resolved = (schema, api) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema);

/** The type of a value in words. */
function kind(schema, api) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((each) => kind(each, api)).join(" or ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${kind(schema.items, api)}`;
  if (schema.format === "binary") return "file";
  return [schema.type].flat().join(" or ");
}

function limits({ minimum, maximum, exclusiveMinimum, exclusiveMaximum, maxLength, anyOf }) {
  const inner = anyOf?.find((each) => each.type !== "null");
  if (inner) return limits(inner);
  const parts = [];
  if (minimum !== undefined) parts.push(`from ${minimum}`);
  if (exclusiveMinimum !== undefined) parts.push(`above ${exclusiveMinimum}`);
  if (maximum !== undefined) parts.push(`to ${maximum}`);
  if (exclusiveMaximum !== undefined) parts.push(`below ${exclusiveMaximum}`);
  if (maxLength !== undefined) parts.push(`at most ${maxLength} characters`);
  return parts.join(", ");
}

const code = (words) => make("code", {}, words);

function inputs({ parameters = [], requestBody }, api) {
  const rows = parameters.map(({ name, in: place, schema }) => {
    const usual = schema.default === undefined || schema.default === "" ? "" : `default ${schema.default}`;
    return [name, place === "path" ? "in the path" : "in the query", kind(schema, api), [limits(schema), usual].filter(Boolean).join("; ")];
  });
  for (const [type, { schema }] of Object.entries(requestBody?.content ?? {})) {
    for (const [name, each] of Object.entries(schema.properties)) {
      const needed = schema.required?.includes(name) ? "" : "optional";
      rows.push([name, type === "application/json" ? "in the JSON body" : "form field", kind(each, api), [limits(each), needed].filter(Boolean).join("; ")]);
    }
  }
  const made = rows.map(([name, ...others]) => make("tr", {}, cell(code(name)), ...others.map((words) => cell(words))));
  return table(["Input", "Where", "Type", "Limits"], made);
}

function outputs({ responses }, api) {
  const [status, response] = Object.entries(responses).find(([each]) => each.startsWith("2"));
  const schema = resolved(response.content?.["application/json"]?.schema, api);
  const rows = Object.entries(schema?.properties ?? {}).map(([name, each]) => make("tr", {}, cell(code(name)), cell(kind(each, api))));
  const refused = Object.keys(responses).filter((each) => !each.startsWith("2"));
  return [
    make("p", {}, `Answers with ${status}`, schema?.description ? `. ${plain(schema.description)}` : ""),
    table(["Field", "Type"], rows),
    make("p", { className: "small" }, `Refusals: ${refused.join(", ")}, each {"error": "the reason in one line"}.`),
  ];
}

/** The fields of a form that are needed, as curl sends them. */
const form = ({ required, properties }) =>
  required.map((name) => ` -F ${name}=${name === "image" ? "@photo.jpg" : properties[name].enum[0]}`).join("");

/** A command that sends the request. */
function example(method, path, { requestBody }) {
  const address = `'${new URL(path.replace("{id}", "ID").slice(1), document.baseURI)}'`;
  const [type, { schema } = {}] = Object.entries(requestBody?.content ?? {})[0] ?? [];
  const body = type === "application/json" ? ` -H 'Content-Type: application/json' -d '{"label": "heron"}'` : type ? form(schema) : "";
  return `curl${method === "get" || (method === "post" && type) ? "" : ` -X ${method.toUpperCase()}`}${body} ${address}`;
}

function operation(method, path, described, api) {
  const title = make("h2", {}, make("span", { className: "method" }, method.toUpperCase()), make("span", { className: "path" }, path));
  const words = described.description.split(/\n\s*\n/).map((part) => make("p", {}, plain(part)));
  const parts = [title, ...words, make("pre", { tabIndex: 0 }, example(method, path, described)), inputs(described, api)];
  const answer = make("details", {}, make("summary", {}, "Answer"), ...outputs(described, api).filter(Boolean));
  return make("article", { className: "card operation" }, ...parts.filter(Boolean), answer);
}

async function start() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`The service answered with status ${response.status}.`);
  const api = await response.json();
  at("about").textContent = `${api.info.title} ${api.info.version}: ${api.info.description} If the service has keys, send one as X-API-Key.`;
  for (const [path, operations] of Object.entries(api.paths)) {
    for (const [method, described] of Object.entries(operations)) at("operations").append(operation(method, path, described, api));
  }
}

start().catch((problem) => (at("error").textContent = problem.message));

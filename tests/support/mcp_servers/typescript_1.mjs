// A shop as an MCP server over streamable HTTP with sessions, by the TypeScript SDK 1.x. Arguments: node_modules, port.
import { randomUUID } from "node:crypto"
import { createServer } from "node:http"
import { createRequire } from "node:module"

const require = createRequire(process.argv[2] + "/")
const { McpServer } = require("@modelcontextprotocol/sdk/server/mcp.js")
const { StreamableHTTPServerTransport } = require("@modelcontextprotocol/sdk/server/streamableHttp.js")
const { z } = require("zod")
const sessions = new Map()

function shop() {
  const server = new McpServer({ name: "shop", version: "1" })
  const text = (text, isError = false) => ({ content: [{ type: "text", text }], isError })
  server.registerTool("price", { description: "The price of an item.", inputSchema: { item: z.string() } }, ({ item }) =>
    item === "moon" ? text("the moon is not for sale", true) : text(`${item}: 23`))
  server.registerTool("learn", { description: "A new tool." }, () => {
    server.registerTool("fly", { description: "New." }, () => text("fly!"))
    return text("learnt")
  })
  return server
}

createServer(async (request, response) => {
  const name = request.headers["mcp-session-id"]
  let transport = sessions.get(name)
  if (name && !transport) return response.writeHead(404).end()
  if (!transport) {
    transport = new StreamableHTTPServerTransport({
      sessionIdGenerator: randomUUID,
      onsessioninitialized: (id) => sessions.set(id, transport),
    })
    await shop().connect(transport)
  }
  await transport.handleRequest(request, response)
}).listen(Number(process.argv[3]), "127.0.0.1")

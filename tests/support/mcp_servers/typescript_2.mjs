// A shop as an MCP server over streamable HTTP without sessions, by the TypeScript SDK 2.x. Arguments: node_modules, port.
import { createServer } from "node:http"
import { createRequire } from "node:module"

const require = createRequire(process.argv[2] + "/")
const { createMcpHandler, McpServer } = require("@modelcontextprotocol/server")
const { toNodeHandler } = require("@modelcontextprotocol/node")
const { z } = require("zod")

function shop() {
  const server = new McpServer({ name: "shop", version: "1" })
  const text = (text, isError = false) => ({ content: [{ type: "text", text }], isError })
  const inputSchema = z.object({ item: z.string() })
  server.registerTool("price", { description: "The price of an item.", inputSchema }, ({ item }) =>
    item === "moon" ? text("the moon is not for sale", true) : text(`${item}: 23`))
  return server
}

createServer(toNodeHandler(createMcpHandler(shop))).listen(Number(process.argv[3]), "127.0.0.1")

"""Chat templates with the traits of the families': small, and written for these tests."""

_QWEN = r"""
{%- if tools %}{{ '<|im_start|>system\nCall functions within <tool_call></tool_call>:\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}THINKING{% endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif %}
{%- endif %}"""

QWEN = _QWEN.replace("THINKING", "")
"""Results share a user's turn."""

THINKING = _QWEN.replace("THINKING", r"{% if loop.last %}{{ '<think>\n</think>\n' }}{% endif %}")
"""Writes a turn in one way while it is the last, and in another afterwards."""

LLAMA = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'user' and tools %}
{{- 'Answer with {"name": function, "parameters": arguments}.\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{%- endif %}
{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""One call a turn, results as JSON."""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- call.function | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + message.content + eos_token }}
{%- endif %}
{%- endfor %}"""
"""No generation prompt; every call and result has an id."""

PLAIN = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Knows no tools."""

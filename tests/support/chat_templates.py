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

QWEN3 = r"""
{%- if tools %}{{ '<|im_start|>system\nCall functions within <tool_call></tool_call>:\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- set asked = namespace(last=messages | length) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set asked.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content, thought = message.content, '' %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{%- if message.reasoning_content is string %}{% set thought = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > asked.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{ content }}
{%- endif %}
{%- for call in message.tool_calls %}
{%- if content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
"""Writes what was thought since the last question, and nothing older."""

QWEN3_OPENED = QWEN3.replace(
    "{{ '<|im_start|>assistant\\n' }}\n{%- if enable", "{{ '<|im_start|>assistant\\n<think>\\n' }}\n{%- if enable"
)
"""Every turn begins within its reasoning."""

QWEN3_CODER = r"""
{%- if tools %}{{ '<|im_start|>system\nReply as <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif %}
{{- '<tool_response>\n' + message.content + '\n</tool_response>\n' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
{%- endfor %}{{ '</function>\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Calls as XML."""

MISTRAL_SMALL = r"""
{{- bos_token }}
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'assistant' %}{{ message.content }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}{{ eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
"""Mistral Small 3.2 and Devstral: a tag for each call, with its id before the arguments."""

QWEN_ITEMS = QWEN.replace(
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}",
    "{% for key, value in call.function.arguments | items %}{{ key + '=' + (value | tojson) }}{% endfor %}"
    "{{- '}\\n</tool_call>' }}",
)
"""Takes arguments only as objects."""

QWEN_TEXT = QWEN.replace("(call.function.arguments | tojson)", "call.function.arguments")
"""Takes arguments only as text."""

ONE_SYSTEM = QWEN.replace(
    "{%- if message.role == 'tool' %}",
    "{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}\n"
    "{%- if message.role == 'tool' %}",
)
"""Takes one system message, at the beginning, as Qwen3.5."""

HARMONY = r"""
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>' + message.role + '<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
"""gpt-oss, without calls: text stands in markup too."""

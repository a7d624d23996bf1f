"""Eight small chat templates in the shapes of the public families, and conversations for them.

Written for these tests; each has the features of its family that make rendering go wrong.
"""

from __future__ import annotations

# ChatML with a default system turn (Qwen2).
QWEN2 = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou are a helper.<|im_end|>\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Headers, BOS in the template, trimmed contents, a date, tools in the first user turn (Llama 3).
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}
    {%- else %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = '' %}{% endif %}
{{- '<|head|>system<|/head|>\n\n' }}{%- if tools is not none %}{{- 'Environment: ipython\n' }}
{%- endif %}{{- 'Today Date: ' + date_string + '\n\n' + system_message + '<|eot|>' }}
{%- if tools is not none and messages | length != 0 %}
    {%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
    {{- '<|head|>user<|/head|>\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{% endfor %}
    {{- first + '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('One call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|head|>ipython<|/head|>\n\n' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{% endif %}{{- '<|eot|>' }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '<|/head|>\n\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\n\n' }}{% endif %}"""

# Turns must alternate; the system turn goes before the last user turn; no header (Mistral).
MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{%- else %}{% set loop_messages = messages %}{% endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{% endif %}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles, got ' + message['role']) }}
    {%- endif %}
{%- endfor %}"""

# The assistant is called model, the system turn is merged into the user's, parts of text (Gemma).
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{{ raise_exception('System role must be one string') }}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<|turn|>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
    {{ '<|/turn|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn|>model\n' }}{%- endif -%}"""

# Role tags, eos when nothing is to be generated (Phi).
PHI = """{% for message in messages %}{% if message['role'] == 'system' %}
{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}
{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}
{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

# All system turns first; the reasoning of earlier turns goes; the header opens a new one (R1).
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}
{% endif %}{% set ns = namespace(is_tool=false, system='', is_first=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- set ns.system = ns.system + ('' if ns.is_first else '\n\n') + message['content'] %}
{%- set ns.is_first = false %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
{{'<|User|>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] %}{%- set ns.is_tool = true -%}
{%- for call in message['tool_calls'] %}
{{- '<|Assistant|><|call|>' + call['function']['name'] + '\n```json\n' }}
{%- if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}
{%- else %}{{ call['function']['arguments'] | tojson }}{% endif %}{{ '\n```<|end_of_turn|>' }}
{%- endfor %}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is not none and
    message['content'] is defined and not message['tool_calls'] %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{{- ('' if ns.is_tool else '<|Assistant|>') + content + '<|end_of_turn|>' }}
{%- endif %}
{%- if message['role'] == 'tool' %}{{ '<|result|>' + message['content'] }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|><think>\n' }}{%- endif %}"""

# Tools, tool calls, tool results in user turns, reasoning kept after the last query (Qwen3).
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
        and not message.content.startswith('<tool_response>') %}
        {%- set ns.searching = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning = reasoning.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

# generation, break and continue, the clock, namespaces, tojson's options, macros, a call id,
# reasoning under its second name.
TRACKED = """{%- macro head(role, name=none) %}<|head|>{{ role }}{% if name %} {{ name }}{% endif %}
<|/head|>{% endmacro %}
{{- bos_token }}{{ 'Today is ' ~ strftime_now('%Y-%m-%d') }}
{% if add_generation_prompt %}To be answered.{% endif %}
{% set ns = namespace(last_user=-1) %}
{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}
{% endfor %}
{% for tool in tools or [] %}
{{ tool | tojson(indent=2, sort_keys=true) }}{{ tool | tojson(separators=(',', ':')) }}
{% endfor %}
{% for m in messages %}
    {% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}
    {% if loop.index0 > ns.last_user + 8 %}{% break %}{% endif %}
    {% set mark = m.role %}
    {% if m.role == 'assistant' %}
        {{- head('assistant', m.name) }}
        {%- generation %}{% set mark = 'inner' %}{% if m.thinking %}({{ m.thinking }}){% endif %}
        {{- m.content | default('') }}
        {%- for call in m.tool_calls or [] %}
            {{- call.id | default('no id') }}{{ call.function | tojson(ensure_ascii=true) }}
        {%- endfor %}<|eot|>{% endgeneration %}
    {% else %}
        {{- head(m.role, m.tool_call_id) ~ m.content ~ '<|eot|>' }}
    {% endif %}
    {{- '#' ~ mark ~ '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ head('assistant') }}{% endif %}"""

TEMPLATES = {
    "qwen2": QWEN2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi": PHI,
    "deepseek": DEEPSEEK,
    "qwen3": QWEN3,
    "tracked": TRACKED,
}
# What the templates write as one token.
SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
    "<|turn|>",
    "<|/turn|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|User|>",
    "<|Assistant|>",
    "<|end_of_turn|>",
    "<|call|>",
    "<|result|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)

Message = dict[str, object]

SYSTEM: Message = {"role": "system", "content": ' Be brief, say "no" & don\'t <think>. '}
USER: Message = {"role": "user", "content": "  hello <b>w\u00f6rld</b> & '\u4f60' \n"}
ANSWER: Message = {"role": "assistant", "content": ' lo and "behold" <1>\n', "name": None}
AGAIN: Message = {"role": "user", "content": "again <|im_end|> then\n\n  more"}
THOUGHT: Message = {"role": "assistant", "content": "<think>\nhm <a>\n</think>\n\nall & none"}
REASONED: Message = {"role": "assistant", "reasoning_content": "hm\n", "content": "all"}
CALL: Message = {
    "id": "c0",
    "type": "function",
    "function": {"name": "f\u00e9", "arguments": {"x": "<1> & '2'", "y": [1, None], "z": 1.5}},
}
TEXT_CALL: Message = {"function": {"name": "g", "arguments": '{"a": 1}'}}
RESULT: Message = {"role": "tool", "tool_call_id": "c0", "content": '{"r": "<3>"}'}
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "f\u00e9",
        "description": "x < y & 'z'",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}

CONVERSATIONS: dict[str, tuple[list[Message], list[Message] | None]] = {
    "one turn": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "two turns": ([USER, ANSWER, AGAIN], None),
    "system and two turns": ([SYSTEM, USER, ANSWER, AGAIN], None),
    "earlier reasoning": ([USER, THOUGHT, AGAIN], None),
    "reasoning apart": ([USER, REASONED, AGAIN], None),
    "reasoning in this turn": ([USER, THOUGHT], None),
    "two users": ([USER, AGAIN], None),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": " a < b "}]}], None),
    "tools": ([USER], [TOOL, TOOL]),
    "tools and system": ([SYSTEM, USER], [TOOL]),
    "no tools": ([USER], []),
    "a call": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        [TOOL],
    ),
    "calls and text": (
        [
            USER,
            {"role": "assistant", "content": "let me <see>", "tool_calls": [TEXT_CALL, CALL]},
            RESULT,
            RESULT,
            ANSWER,
            AGAIN,
        ],
        [TOOL],
    ),
    "late system": ([USER, ANSWER, SYSTEM, AGAIN], None),
}

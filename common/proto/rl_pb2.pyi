from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ContextKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_KIND_UNSPECIFIED: _ClassVar[ContextKind]
    TEMPLATE: _ClassVar[ContextKind]
    TASK: _ClassVar[ContextKind]
    OBSERVATION: _ClassVar[ContextKind]
    REPLAY: _ClassVar[ContextKind]
    SUMMARY: _ClassVar[ContextKind]
    NOTICE: _ClassVar[ContextKind]

class StepKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_KIND_UNSPECIFIED: _ClassVar[StepKind]
    ACT: _ClassVar[StepKind]
    SUMMARY_STEP: _ClassVar[StepKind]
    SUBAGENT: _ClassVar[StepKind]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    STOP: _ClassVar[Finish]
    LENGTH: _ClassVar[Finish]
    ABORT: _ClassVar[Finish]

class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_UNSPECIFIED: _ClassVar[Source]
    POLICY: _ClassVar[Source]
    REFERENCE: _ClassVar[Source]
    EXTERNAL: _ClassVar[Source]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATUS_UNSPECIFIED: _ClassVar[Status]
    RUNNING: _ClassVar[Status]
    TERMINATED: _ClassVar[Status]
    TRUNCATED: _ClassVar[Status]
    FAILED: _ClassVar[Status]

class DeliverStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DELIVER_STATUS_UNSPECIFIED: _ClassVar[DeliverStatus]
    MORE: _ClassVar[DeliverStatus]
    STORED: _ClassVar[DeliverStatus]
    DUPLICATE: _ClassVar[DeliverStatus]
    SUPERSEDED: _ClassVar[DeliverStatus]
    REFUSED: _ClassVar[DeliverStatus]
    RESEND: _ClassVar[DeliverStatus]
    UNPROVEN: _ClassVar[DeliverStatus]
CONTEXT_KIND_UNSPECIFIED: ContextKind
TEMPLATE: ContextKind
TASK: ContextKind
OBSERVATION: ContextKind
REPLAY: ContextKind
SUMMARY: ContextKind
NOTICE: ContextKind
STEP_KIND_UNSPECIFIED: StepKind
ACT: StepKind
SUMMARY_STEP: StepKind
SUBAGENT: StepKind
FINISH_UNSPECIFIED: Finish
STOP: Finish
LENGTH: Finish
ABORT: Finish
SOURCE_UNSPECIFIED: Source
POLICY: Source
REFERENCE: Source
EXTERNAL: Source
STATUS_UNSPECIFIED: Status
RUNNING: Status
TERMINATED: Status
TRUNCATED: Status
FAILED: Status
DELIVER_STATUS_UNSPECIFIED: DeliverStatus
MORE: DeliverStatus
STORED: DeliverStatus
DUPLICATE: DeliverStatus
SUPERSEDED: DeliverStatus
REFUSED: DeliverStatus
RESEND: DeliverStatus
UNPROVEN: DeliverStatus

class TaskMessage(_message.Message):
    __slots__ = ("domain", "id", "seed", "payload_json")
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_JSON_FIELD_NUMBER: _ClassVar[int]
    domain: str
    id: str
    seed: int
    payload_json: str
    def __init__(self, domain: _Optional[str] = ..., id: _Optional[str] = ..., seed: _Optional[int] = ..., payload_json: _Optional[str] = ...) -> None: ...

class SamplingMessage(_message.Message):
    __slots__ = ("temperature", "max_new_tokens", "stop", "stop_token_ids", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: bytes
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[bytes] = ..., seed: _Optional[int] = ...) -> None: ...

class SpansMessage(_message.Message):
    __slots__ = ("starts", "kinds")
    STARTS_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    starts: bytes
    kinds: bytes
    def __init__(self, starts: _Optional[bytes] = ..., kinds: _Optional[bytes] = ...) -> None: ...

class VersionRunMessage(_message.Message):
    __slots__ = ("start", "version", "engine", "pool")
    START_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    start: int
    version: int
    engine: str
    pool: str
    def __init__(self, start: _Optional[int] = ..., version: _Optional[int] = ..., engine: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class ToolOutcomeMessage(_message.Message):
    __slots__ = ("name", "ok", "error", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    ok: bool
    error: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., ok: _Optional[bool] = ..., error: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ArrayMessage(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StepMessage(_message.Message):
    __slots__ = ("parent", "prefix_len", "context_ids", "context_spans", "action_ids", "action_logprobs", "action_spans", "versions", "kind", "reward", "finish", "tool_outcomes", "timings", "state_key", "extras")
    class TimingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ExtrasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: ArrayMessage
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[ArrayMessage, _Mapping]] = ...) -> None: ...
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_SPANS_FIELD_NUMBER: _ClassVar[int]
    ACTION_IDS_FIELD_NUMBER: _ClassVar[int]
    ACTION_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ACTION_SPANS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TOOL_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    STATE_KEY_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    prefix_len: int
    context_ids: bytes
    context_spans: SpansMessage
    action_ids: bytes
    action_logprobs: bytes
    action_spans: SpansMessage
    versions: _containers.RepeatedCompositeFieldContainer[VersionRunMessage]
    kind: StepKind
    reward: float
    finish: Finish
    tool_outcomes: _containers.RepeatedCompositeFieldContainer[ToolOutcomeMessage]
    timings: _containers.ScalarMap[str, float]
    state_key: bytes
    extras: _containers.MessageMap[str, ArrayMessage]
    def __init__(self, parent: _Optional[int] = ..., prefix_len: _Optional[int] = ..., context_ids: _Optional[bytes] = ..., context_spans: _Optional[_Union[SpansMessage, _Mapping]] = ..., action_ids: _Optional[bytes] = ..., action_logprobs: _Optional[bytes] = ..., action_spans: _Optional[_Union[SpansMessage, _Mapping]] = ..., versions: _Optional[_Iterable[_Union[VersionRunMessage, _Mapping]]] = ..., kind: _Optional[_Union[StepKind, str]] = ..., reward: _Optional[float] = ..., finish: _Optional[_Union[Finish, str]] = ..., tool_outcomes: _Optional[_Iterable[_Union[ToolOutcomeMessage, _Mapping]]] = ..., timings: _Optional[_Mapping[str, float]] = ..., state_key: _Optional[bytes] = ..., extras: _Optional[_Mapping[str, ArrayMessage]] = ...) -> None: ...

class TrajectoryMessage(_message.Message):
    __slots__ = ("rollout_id", "attempt", "group_id", "task", "source", "steps", "tail_ids", "tail_spans", "status", "flags", "metrics", "sampling")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TAIL_IDS_FIELD_NUMBER: _ClassVar[int]
    TAIL_SPANS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    attempt: int
    group_id: str
    task: TaskMessage
    source: Source
    steps: _containers.RepeatedCompositeFieldContainer[StepMessage]
    tail_ids: bytes
    tail_spans: SpansMessage
    status: Status
    flags: _containers.RepeatedScalarFieldContainer[str]
    metrics: _containers.ScalarMap[str, float]
    sampling: SamplingMessage
    def __init__(self, rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ..., group_id: _Optional[str] = ..., task: _Optional[_Union[TaskMessage, _Mapping]] = ..., source: _Optional[_Union[Source, str]] = ..., steps: _Optional[_Iterable[_Union[StepMessage, _Mapping]]] = ..., tail_ids: _Optional[bytes] = ..., tail_spans: _Optional[_Union[SpansMessage, _Mapping]] = ..., status: _Optional[_Union[Status, str]] = ..., flags: _Optional[_Iterable[str]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., sampling: _Optional[_Union[SamplingMessage, _Mapping]] = ...) -> None: ...

class WaitMessage(_message.Message):
    __slots__ = ("name", "owner", "on", "seconds", "deadline", "why", "silent", "number")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    on: str
    seconds: float
    deadline: float
    why: str
    silent: float
    number: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., on: _Optional[str] = ..., seconds: _Optional[float] = ..., deadline: _Optional[float] = ..., why: _Optional[str] = ..., silent: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...

class MessageMessage(_message.Message):
    __slots__ = ("role", "text", "tool_call_id")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    role: str
    text: str
    tool_call_id: str
    def __init__(self, role: _Optional[str] = ..., text: _Optional[str] = ..., tool_call_id: _Optional[str] = ...) -> None: ...

class ToolCallMessage(_message.Message):
    __slots__ = ("id", "name", "arguments_json", "error")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments_json: str
    error: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments_json: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class ActionMessage(_message.Message):
    __slots__ = ("text", "tool_calls")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallMessage]
    def __init__(self, text: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallMessage, _Mapping]]] = ...) -> None: ...

class ObservationMessage(_message.Message):
    __slots__ = ("messages", "reward", "status", "metrics", "tool_outcomes", "state_key")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TOOL_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    STATE_KEY_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[MessageMessage]
    reward: float
    status: Status
    metrics: _containers.ScalarMap[str, float]
    tool_outcomes: _containers.RepeatedCompositeFieldContainer[ToolOutcomeMessage]
    state_key: bytes
    def __init__(self, messages: _Optional[_Iterable[_Union[MessageMessage, _Mapping]]] = ..., reward: _Optional[float] = ..., status: _Optional[_Union[Status, str]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., tool_outcomes: _Optional[_Iterable[_Union[ToolOutcomeMessage, _Mapping]]] = ..., state_key: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SplitInfo(_message.Message):
    __slots__ = ("tasks", "fingerprint", "quarantined")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    tasks: int
    fingerprint: str
    quarantined: int
    def __init__(self, tasks: _Optional[int] = ..., fingerprint: _Optional[str] = ..., quarantined: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("domain", "capacity", "open_sessions", "tools_json", "instructions", "splits", "has_reference", "draining", "lease_seconds")
    class SplitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SplitInfo
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SplitInfo, _Mapping]] = ...) -> None: ...
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    HAS_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    domain: str
    capacity: int
    open_sessions: int
    tools_json: str
    instructions: str
    splits: _containers.MessageMap[str, SplitInfo]
    has_reference: bool
    draining: bool
    lease_seconds: float
    def __init__(self, domain: _Optional[str] = ..., capacity: _Optional[int] = ..., open_sessions: _Optional[int] = ..., tools_json: _Optional[str] = ..., instructions: _Optional[str] = ..., splits: _Optional[_Mapping[str, SplitInfo]] = ..., has_reference: _Optional[bool] = ..., draining: _Optional[bool] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class ListTasksRequest(_message.Message):
    __slots__ = ("split", "offset", "limit")
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    split: str
    offset: int
    limit: int
    def __init__(self, split: _Optional[str] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class ListTasksReply(_message.Message):
    __slots__ = ("tasks", "total", "fingerprint")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[TaskMessage]
    total: int
    fingerprint: str
    def __init__(self, tasks: _Optional[_Iterable[_Union[TaskMessage, _Mapping]]] = ..., total: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("session_id", "task", "with_reference")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WITH_REFERENCE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    task: TaskMessage
    with_reference: bool
    def __init__(self, session_id: _Optional[str] = ..., task: _Optional[_Union[TaskMessage, _Mapping]] = ..., with_reference: _Optional[bool] = ...) -> None: ...

class OpenReply(_message.Message):
    __slots__ = ("observation", "tools_json", "instructions", "reference", "lease_seconds", "task_id")
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTIONS_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    observation: ObservationMessage
    tools_json: str
    instructions: str
    reference: _containers.RepeatedCompositeFieldContainer[ActionMessage]
    lease_seconds: float
    task_id: str
    def __init__(self, observation: _Optional[_Union[ObservationMessage, _Mapping]] = ..., tools_json: _Optional[str] = ..., instructions: _Optional[str] = ..., reference: _Optional[_Iterable[_Union[ActionMessage, _Mapping]]] = ..., lease_seconds: _Optional[float] = ..., task_id: _Optional[str] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session_id", "step_index", "action")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    step_index: int
    action: ActionMessage
    def __init__(self, session_id: _Optional[str] = ..., step_index: _Optional[int] = ..., action: _Optional[_Union[ActionMessage, _Mapping]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("observation",)
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    observation: ObservationMessage
    def __init__(self, observation: _Optional[_Union[ObservationMessage, _Mapping]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ("existed",)
    EXISTED_FIELD_NUMBER: _ClassVar[int]
    existed: bool
    def __init__(self, existed: _Optional[bool] = ...) -> None: ...

class RenewSessionsRequest(_message.Message):
    __slots__ = ("session_ids",)
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewSessionsReply(_message.Message):
    __slots__ = ("lost", "open_sessions", "capacity", "draining", "waits")
    LOST_FIELD_NUMBER: _ClassVar[int]
    OPEN_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    open_sessions: int
    capacity: int
    draining: bool
    waits: _containers.RepeatedCompositeFieldContainer[WaitMessage]
    def __init__(self, lost: _Optional[_Iterable[str]] = ..., open_sessions: _Optional[int] = ..., capacity: _Optional[int] = ..., draining: _Optional[bool] = ..., waits: _Optional[_Iterable[_Union[WaitMessage, _Mapping]]] = ...) -> None: ...

class LimitsMessage(_message.Message):
    __slots__ = ("max_turns", "max_tokens", "deadline_s")
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    max_turns: int
    max_tokens: int
    deadline_s: float
    def __init__(self, max_turns: _Optional[int] = ..., max_tokens: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class ContextPolicyMessage(_message.Message):
    __slots__ = ("name", "options_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    options_json: str
    def __init__(self, name: _Optional[str] = ..., options_json: _Optional[str] = ...) -> None: ...

class AssignmentMessage(_message.Message):
    __slots__ = ("rollout_id", "attempt", "group_id", "task", "source", "purpose", "limits", "sampling", "context", "stale_share", "stage")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    STALE_SHARE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    attempt: int
    group_id: str
    task: TaskMessage
    source: Source
    purpose: str
    limits: LimitsMessage
    sampling: SamplingMessage
    context: ContextPolicyMessage
    stale_share: float
    stage: int
    def __init__(self, rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ..., group_id: _Optional[str] = ..., task: _Optional[_Union[TaskMessage, _Mapping]] = ..., source: _Optional[_Union[Source, str]] = ..., purpose: _Optional[str] = ..., limits: _Optional[_Union[LimitsMessage, _Mapping]] = ..., sampling: _Optional[_Union[SamplingMessage, _Mapping]] = ..., context: _Optional[_Union[ContextPolicyMessage, _Mapping]] = ..., stale_share: _Optional[float] = ..., stage: _Optional[int] = ...) -> None: ...

class EngineMessage(_message.Message):
    __slots__ = ("name", "url", "pool", "version", "state", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    url: str
    pool: str
    version: int
    state: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., url: _Optional[str] = ..., pool: _Optional[str] = ..., version: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RolloutKey(_message.Message):
    __slots__ = ("rollout_id", "attempt")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    attempt: int
    def __init__(self, rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("actor_id", "capacity")
    ACTOR_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    actor_id: str
    capacity: int
    def __init__(self, actor_id: _Optional[str] = ..., capacity: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("incarnation", "assignments", "no_more", "retry_after_s", "engines")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    NO_MORE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    assignments: _containers.RepeatedCompositeFieldContainer[AssignmentMessage]
    no_more: bool
    retry_after_s: float
    engines: _containers.RepeatedCompositeFieldContainer[EngineMessage]
    def __init__(self, incarnation: _Optional[int] = ..., assignments: _Optional[_Iterable[_Union[AssignmentMessage, _Mapping]]] = ..., no_more: _Optional[bool] = ..., retry_after_s: _Optional[float] = ..., engines: _Optional[_Iterable[_Union[EngineMessage, _Mapping]]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("actor_id", "incarnation", "running", "waits", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ACTOR_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    actor_id: str
    incarnation: int
    running: _containers.RepeatedCompositeFieldContainer[RolloutKey]
    waits: _containers.RepeatedCompositeFieldContainer[WaitMessage]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, actor_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., running: _Optional[_Iterable[_Union[RolloutKey, _Mapping]]] = ..., waits: _Optional[_Iterable[_Union[WaitMessage, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("incarnation", "engines", "cancel", "no_more")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    NO_MORE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    engines: _containers.RepeatedCompositeFieldContainer[EngineMessage]
    cancel: _containers.RepeatedCompositeFieldContainer[RolloutKey]
    no_more: bool
    def __init__(self, incarnation: _Optional[int] = ..., engines: _Optional[_Iterable[_Union[EngineMessage, _Mapping]]] = ..., cancel: _Optional[_Iterable[_Union[RolloutKey, _Mapping]]] = ..., no_more: _Optional[bool] = ...) -> None: ...

class DeliverRequest(_message.Message):
    __slots__ = ("actor_id", "incarnation", "rollout_id", "attempt", "chunk", "chunks", "total_bytes", "crc32", "payload")
    ACTOR_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    actor_id: str
    incarnation: int
    rollout_id: str
    attempt: int
    chunk: int
    chunks: int
    total_bytes: int
    crc32: int
    payload: bytes
    def __init__(self, actor_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., rollout_id: _Optional[str] = ..., attempt: _Optional[int] = ..., chunk: _Optional[int] = ..., chunks: _Optional[int] = ..., total_bytes: _Optional[int] = ..., crc32: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class DeliverReply(_message.Message):
    __slots__ = ("status", "reason", "incarnation")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    status: DeliverStatus
    reason: str
    incarnation: int
    def __init__(self, status: _Optional[_Union[DeliverStatus, str]] = ..., reason: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("report_json",)
    REPORT_JSON_FIELD_NUMBER: _ClassVar[int]
    report_json: str
    def __init__(self, report_json: _Optional[str] = ...) -> None: ...

//! The steps of random programs, and how they are drawn.

use std::ops::Range;

use aquifer_device::AccessKind;
use proptest::prelude::*;

/// Bytes of a unit of memory, in which places are given.
pub(crate) const UNIT: u64 = 64;
/// Units that programs use of each memory.
pub(crate) const UNITS: u64 = 4;

/// Memory by number.
pub(crate) const PLAIN: Range<usize> = 0..2;
pub(crate) const POOL: Range<usize> = 2..4;
pub(crate) const MAPPED: Range<usize> = 4..7;
pub(crate) const PINNED: Range<usize> = 7..9;
/// Among those that are pinned, memory of the program's own.
pub(crate) const REGISTERED: usize = 8;
pub(crate) const PAGEABLE: usize = 9;
pub(crate) const MEMORIES: usize = 10;

pub(crate) const STREAMS: usize = 6;
pub(crate) const EVENTS: usize = 3;
pub(crate) const GRAPHS: usize = 2;

/// Units of a memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) memory: usize,
    pub(crate) from: u64,
    pub(crate) units: u64,
}

impl Place {
    pub(crate) fn bytes(self) -> u64 {
        self.units * UNIT
    }
}

/// One call, or a few that belong together. Those that the state makes impossible do nothing.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Kernel(usize, Vec<(Place, AccessKind)>),
    Fill(usize, Place),
    /// Copies from the first place to the second, as much as both hold.
    Copy(usize, Place, Place),
    CopyRows(usize, Place, Place),
    CopyBatch(usize, Vec<(Place, Place)>),
    Record(usize, usize),
    Wait(usize, usize),
    SynchronizeStream(usize),
    QueryStream(usize),
    SynchronizeEvent(usize),
    QueryEvent(usize),
    Elapsed(usize, usize),
    RenewEvent(usize),
    Synchronize,
    Advance(u64),
    CreateStream(usize, bool),
    DestroyStream(usize),
    BeginCapture(usize),
    EndCapture(usize, usize),
    LaunchGraph(usize, usize),
    DestroyGraph(usize),
    HostAccess(Place, AccessKind),
    /// Frees memory of any kind and allocates new memory in its place.
    Renew(usize, usize),
    FreeAsync(usize, usize),
    Map(usize, usize),
    Unmap(usize),
    RenewPhysical(usize),
    EndThread,
}

/// An action of one of the host's threads.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) thread: usize,
    /// Whether it is made even if it races. Others are left out then, so that programs get far.
    pub(crate) bold: bool,
    pub(crate) action: Action,
}

fn place(memories: Range<usize>) -> impl Strategy<Value = Place> {
    let units = prop_oneof![16 => 1..=2_u64, 2 => 3..=UNITS, 1 => Just(0)];
    (memories, 0..UNITS, units).prop_map(|(memory, from, units)| Place { memory, from, units: units.min(UNITS - from) })
}

fn kind() -> impl Strategy<Value = AccessKind> {
    prop_oneof![Just(AccessKind::Read), Just(AccessKind::Write)]
}

fn action() -> impl Strategy<Value = Action> {
    use Action::*;
    let device = || place(0..PINNED.start);
    let any = || place(0..MEMORIES);
    let (stream, event, graph) = (|| 0..STREAMS, || 0..EVENTS, || 0..GRAPHS);
    let touches = prop::collection::vec((device(), kind()), 0..3);
    prop_oneof![
        14 => (stream(), touches).prop_map(|(stream, touches)| Kernel(stream, touches)),
        8 => (stream(), device()).prop_map(|(stream, place)| Fill(stream, place)),
        12 => (stream(), any(), any()).prop_map(|(stream, from, to)| Copy(stream, from, to)),
        2 => (stream(), any(), any()).prop_map(|(stream, from, to)| CopyRows(stream, from, to)),
        2 => (stream(), prop::collection::vec((any(), any()), 1..3))
            .prop_map(|(stream, parts)| CopyBatch(stream, parts)),
        10 => (event(), stream()).prop_map(|(event, stream)| Record(event, stream)),
        10 => (stream(), event()).prop_map(|(stream, event)| Wait(stream, event)),
        4 => stream().prop_map(SynchronizeStream),
        3 => stream().prop_map(QueryStream),
        3 => event().prop_map(SynchronizeEvent),
        3 => event().prop_map(QueryEvent),
        1 => (event(), event()).prop_map(|(start, end)| Elapsed(start, end)),
        1 => event().prop_map(RenewEvent),
        1 => Just(Synchronize),
        2 => (1..50_000_u64).prop_map(Advance),
        1 => (2..STREAMS, prop::bool::ANY).prop_map(|(stream, non_blocking)| CreateStream(stream, non_blocking)),
        1 => (2..STREAMS).prop_map(DestroyStream),
        3 => (1..STREAMS).prop_map(BeginCapture),
        4 => (1..STREAMS, graph()).prop_map(|(stream, graph)| EndCapture(stream, graph)),
        5 => (graph(), stream()).prop_map(|(graph, stream)| LaunchGraph(graph, stream)),
        1 => graph().prop_map(DestroyGraph),
        4 => (place(PINNED), kind()).prop_map(|(place, kind)| HostAccess(place, kind)),
        2 => (0..PAGEABLE, stream()).prop_map(|(memory, stream)| Renew(memory, stream)),
        1 => (POOL, stream()).prop_map(|(memory, stream)| FreeAsync(memory, stream)),
        4 => (MAPPED, 0..2_usize).prop_map(|(memory, physical)| Map(memory, physical)),
        2 => MAPPED.prop_map(Unmap),
        1 => (0..2_usize).prop_map(RenewPhysical),
        1 => Just(EndThread),
    ]
}

/// A capture of one stream or two, and launches of its graph.
fn capture() -> impl Strategy<Value = Vec<Action>> {
    use Action::*;
    // Graphs mostly name mapped memory, so that two places are one more often.
    let device = || prop_oneof![2 => place(MAPPED), 1 => place(0..PINNED.start)];
    let memory = move || prop_oneof![3 => device(), 1 => place(PINNED)];
    let node = move |stream: usize| {
        prop_oneof![
            prop::collection::vec((device(), kind()), 0..3).prop_map(move |touches| Kernel(stream, touches)),
            device().prop_map(move |place| Fill(stream, place)),
            (memory(), memory()).prop_map(move |(from, to)| Copy(stream, from, to)),
        ]
    };
    (1..STREAMS, 1..STREAMS, 0..GRAPHS).prop_flat_map(move |(origin, other, graph)| {
        let link = move |from: usize, to: usize| {
            (0..EVENTS, prop::bool::weighted(0.9))
                .prop_map(move |(event, waits)| (Record(event, from), if waits { Wait(to, event) } else { Advance(1) }))
        };
        let nodes = move || prop::collection::vec(prop_oneof![node(origin), node(other)], 0..3);
        let after = prop_oneof![
            3 => (0..STREAMS).prop_map(move |stream| LaunchGraph(graph, stream)),
            1 => action(),
        ];
        // Addresses that the graph names may have other memory behind them when it is launched.
        let moves = prop::option::weighted(0.4, (MAPPED, 0..2_usize));
        let launches = (moves, prop::collection::vec(after, 1..5)).prop_map(|(moves, mut launches)| {
            if let Some((memory, physical)) = moves {
                launches.splice(..0, [Synchronize, Unmap(memory), Map(memory, physical)]);
            }
            launches
        });
        (node(origin), link(origin, other), nodes(), nodes(), link(other, origin), launches).prop_map(
            move |(first, fork, one, two, join, launches)| {
                let mut actions = vec![BeginCapture(origin), first, fork.0, fork.1];
                actions.extend(one.into_iter().chain(two));
                actions.extend([join.0, join.1, EndCapture(origin, graph)]);
                actions.extend(launches);
                actions
            },
        )
    })
}

/// The steps of a program.
pub(crate) fn program() -> impl Strategy<Value = Vec<Step>> {
    let thread = prop_oneof![12 => Just(0), 2 => Just(1), 1 => Just(2)];
    let actions = prop_oneof![16 => action().prop_map(|action| vec![action]), 1 => capture()];
    let steps = (thread, prop::bool::weighted(0.1), actions).prop_map(|(thread, bold, actions)| {
        actions.into_iter().map(|action| Step { thread, bold, action }).collect::<Vec<_>>()
    });
    let steps = prop::collection::vec(steps, 1..60).prop_map(|steps| steps.concat());
    (steps, prop::bool::weighted(0.3)).prop_map(|(mut steps, has_threads)| {
        steps.iter_mut().for_each(|step| step.thread *= usize::from(has_threads));
        steps
    })
}

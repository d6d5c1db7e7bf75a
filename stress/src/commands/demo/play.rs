//! The replays that the demonstration tells about.

use aquifer::memory::{Config, OomReport};
use aquifer_allocator::config::Backing;
use aquifer_allocator::snapshot::BlockState;

use super::SEGMENTS;
use crate::cli::ConfigArg;
use crate::commands::replay::hazards;
use crate::exit::Failure;
use crate::harness::{OnOom, Player};
use crate::input::{Event, Program};
use crate::map::Map;
use crate::session::Session;
use crate::stage::Stage;
use crate::subject::{Refused, Subject};

/// A program on a device with plenty, at the moment when it held most of it.
#[derive(Debug)]
pub(super) struct Roomy {
    pub(super) device_bytes: u64,
    pub(super) reserved: u64,
    pub(super) live: u64,
    pub(super) segments: usize,
    /// Bytes of segments without a live block.
    pub(super) unused: u64,
    /// Free blocks in other segments.
    pub(super) pieces: usize,
    /// Their bytes.
    pub(super) in_pieces: u64,
    pub(super) map: Map,
    /// Requests refused.
    pub(super) ooms: u64,
    pub(super) hazards: u64,
}

/// Looks at the reserved bytes after every allocation.
struct Watched {
    stage: Stage,
    allocations: usize,
    /// The most that was reserved, and after how many allocations it was first.
    most: (u64, usize),
}

impl Subject for Watched {
    type Handle = <Stage as Subject>::Handle;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Self::Handle, Refused> {
        let allocation = self.stage.alloc(bytes, stream);
        self.allocations += 1;
        let reserved = self.stage.allocator.memory_reserved();
        if reserved > self.most.0 {
            self.most = (reserved, self.allocations);
        }
        allocation
    }

    fn free(&mut self, handle: Self::Handle) {
        self.stage.free(handle);
    }

    fn record_stream(&mut self, handle: &mut Self::Handle, stream: u16) -> Result<(), Refused> {
        self.stage.record_stream(handle, stream)
    }
}

/// The device is that of the session, or four times what the program needs if that is more.
pub(super) fn roomy(session: &Session, program: &Program) -> Result<Roomy, Failure> {
    let plenty = program.peak_requested_bytes.saturating_mul(4).next_multiple_of(1 << 30);
    let device_bytes = session.sim().map_or(plenty, |sim| sim.capacity_bytes.max(plenty));
    let streams = program.streams.len();
    let open = || session.open_with_capacity(device_bytes);

    let stage = Stage::new(session, &open()?, &classical(), streams)?;
    let mut watched = Watched { stage, allocations: 0, most: (0, 0) };
    let ooms = Player::new(program).play(&mut watched, OnOom::Skip)?;
    let (reserved, allocations) = watched.most;

    // The same again, up to that allocation.
    let begun = first(program, allocations);
    let device = open()?;
    let mut stage = Stage::new(session, &device, &classical(), streams)?;
    let mut player = Player::new(&begun);
    player.play(&mut stage, OnOom::Skip)?;
    let segments = stage.allocator.snapshot().segments;
    let is_unused = |active: u64| active == 0;
    let free = segments.iter().filter(|segment| !is_unused(segment.active_size)).flat_map(|segment| &segment.blocks);
    let free: Vec<u64> = free.filter(|block| block.state == BlockState::Inactive).map(|block| block.size).collect();
    Ok(Roomy {
        device_bytes,
        reserved,
        live: stage.allocator.memory_allocated(),
        segments: segments.len(),
        unused: segments
            .iter()
            .filter(|segment| is_unused(segment.active_size))
            .map(|segment| segment.total_size)
            .sum(),
        pieces: free.len(),
        in_pieces: free.iter().sum(),
        map: Map::of(&stage.allocator)?,
        ooms,
        hazards: hazards(session, &program.name, watched.stage.allocator.device()),
    })
}

/// The options under which the allocator follows PyTorch's rules.
fn classical() -> ConfigArg {
    let mut config = Config::default();
    config.backing = Backing::Segments;
    ConfigArg { text: SEGMENTS.to_owned(), config }
}

/// The program up to and including its `count`th allocation.
fn first(program: &Program, count: usize) -> Program {
    let is_alloc = |(_, event): &(usize, &Event)| matches!(event, Event::Alloc { .. });
    let last = program.events.iter().enumerate().filter(is_alloc).nth(count.saturating_sub(1));
    let events = last.map_or(0, |(index, _)| index + 1);
    Program { events: program.events[..events].to_vec(), ..program.clone() }
}

/// A program on a device that may be too small for it.
#[derive(Debug)]
pub(super) struct Exhausted {
    /// Why it ended early, if it did.
    pub(super) report: Option<Box<OomReport>>,
    /// The allocation or free that was refused, counted from 1, of how many.
    pub(super) event: u64,
    pub(super) events: u64,
    pub(super) map: Map,
    /// Blocks that were live, and how many of them did not read as they were written.
    pub(super) blocks: usize,
    pub(super) damaged: usize,
    /// Whether the request was served after the program had freed its blocks.
    pub(super) served_again: bool,
    pub(super) hazards: u64,
}

/// Plays the program until a request is refused.
pub(super) fn exhausted(session: &Session, program: &Program, capacity: u64) -> Result<Exhausted, Failure> {
    let device = session.open_with_capacity(capacity)?;
    let stage = Stage::new(session, &device, &classical(), program.streams.len())?;
    let mut stage = Counted { stage: stage.filling(), operations: 0 };
    let mut player = Player::new(program);
    player.play(&mut stage, OnOom::Stop)?;
    let Counted { mut stage, operations } = stage;
    let map = Map::of(&stage.allocator)?;
    let (blocks, damaged) = stage.damaged()?;
    drop(player);
    let report = stage.first_oom.take();
    let again = report.as_ref().map(|report| stage.allocator.alloc_bytes(report.requested, &stage.streams[0]));
    let served_again = again.is_some_and(|again| again.is_ok());
    Ok(Exhausted {
        report,
        event: operations,
        events: program.operations(),
        map,
        blocks,
        damaged,
        served_again,
        hazards: hazards(session, &program.name, &device),
    })
}

/// A program whose memory moves to where it is needed.
#[derive(Debug)]
pub(super) struct Moving {
    /// Why it does not, if so.
    pub(super) why_segments: Option<String>,
    /// Why it ended early, if it did.
    pub(super) report: Option<Box<OomReport>>,
    pub(super) reserved: u64,
    pub(super) remaps: u64,
    pub(super) granules_moved: u64,
    pub(super) damaged: usize,
    pub(super) hazards: u64,
}

/// Plays the program with the default options, until a request is refused or it ends. Blocks have
/// known contents; those that are live after half of it are looked at then.
pub(super) fn moving(session: &Session, program: &Program, capacity: u64) -> Result<Moving, Failure> {
    let device = session.open_with_capacity(capacity)?;
    let stage = Stage::new(session, &device, &ConfigArg::default(), program.streams.len())?;
    let mut stage = stage.filling();
    let allocations = program.events.iter().filter(|event| matches!(event, Event::Alloc { .. })).count();
    let half = first(program, allocations / 2);
    let mut player = Player::new(&half);
    player.play(&mut stage, OnOom::Stop)?;
    let (_, damaged) = stage.damaged()?;
    drop(player);
    Player::new(program).play(&mut stage, OnOom::Stop)?;
    let stats = stage.allocator.stats();
    Ok(Moving {
        why_segments: stage.allocator.why_segments().map(ToString::to_string),
        report: stage.first_oom.take(),
        reserved: stats.reserved_bytes.all.peak,
        remaps: stats.remaps,
        granules_moved: stats.granules_moved,
        damaged,
        hazards: hazards(session, &program.name, &device),
    })
}

/// Counts allocations and frees.
struct Counted {
    stage: Stage,
    operations: u64,
}

impl Subject for Counted {
    type Handle = <Stage as Subject>::Handle;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Self::Handle, Refused> {
        self.operations += 1;
        self.stage.alloc(bytes, stream)
    }

    fn free(&mut self, handle: Self::Handle) {
        self.operations += 1;
        self.stage.free(handle);
    }

    fn record_stream(&mut self, handle: &mut Self::Handle, stream: u16) -> Result<(), Refused> {
        self.stage.record_stream(handle, stream)
    }
}

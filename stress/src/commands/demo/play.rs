//! The replays of the demonstration. Their results are also its JSON rows; `demo --help` explains
//! the fields.

use aquifer::memory::{Config, OomReport};
use aquifer_allocator::config::Backing;
use aquifer_trace::input::{Event, Program};
use aquifer_trace::profile::Profile;
use aquifer_trace::{Figures, Map, OnOom, Player};
use serde::Serialize;

use super::{PYTORCH, SEGMENTS};
use crate::cli::ConfigArg;
use crate::commands::study::sampled::sample;
use crate::commands::{ratio, violations};
use crate::exit::Failure;
use crate::session::Session;
use crate::stage::Stage;

/// A program on a device with plenty of memory, when it held the most.
#[derive(Debug, Serialize)]
pub(super) struct Roomy {
    trace: String,
    pub(super) device_bytes: u64,
    peak_requested_bytes: u64,
    pub(super) peak_reserved_bytes: u64,
    pub(super) allocated_bytes: u64,
    /// Segments without a live block.
    pub(super) unused_segment_bytes: u64,
    /// Free blocks in other segments.
    pub(super) pieces: usize,
    pub(super) piece_bytes: u64,
    pub(super) ooms: u64,
    #[serde(skip)]
    pub(super) segments: u64,
    #[serde(skip)]
    pub(super) map: Map,
}

/// Plays the program to the model of PyTorch's allocator on the session's device, or on one with
/// four times the memory that it needs.
pub(super) fn roomy(session: &Session, program: &Program) -> Result<Roomy, Failure> {
    let plenty = program.peak_requested_bytes.saturating_mul(4).next_multiple_of(1 << 30);
    let device_bytes = session.sim().map_or(plenty, |sim| sim.capacity_bytes.max(plenty));
    let pytorch = PYTORCH.parse::<ConfigArg>().map_err(|error| Failure::Usage(error.to_string()))?;
    let buckets = Profile::of(program).buckets;
    let sampled = sample(&session.resized(device_bytes), program, &pytorch, &buckets, Some(&[]))?;
    let map = sampled.fullest.unwrap_or_else(|| Map::new(Vec::new(), device_bytes, device_bytes));
    let (unused_segment_bytes, pieces) = map.unused();
    let Figures { live, segments, .. } = map.figures();
    Ok(Roomy {
        trace: program.name.clone(),
        device_bytes,
        peak_requested_bytes: program.peak_requested_bytes,
        peak_reserved_bytes: sampled.peak_reserved,
        allocated_bytes: live,
        unused_segment_bytes,
        pieces: pieces.len(),
        piece_bytes: pieces.iter().sum(),
        ooms: sampled.refused_at.len() as u64,
        segments,
        map,
    })
}

/// This project's allocator with memory that does not move.
fn classical() -> ConfigArg {
    let mut config = Config::default();
    config.backing = Backing::Segments;
    ConfigArg { text: SEGMENTS.to_owned(), config, ..ConfigArg::default() }
}

/// The program up to and including its `count`th request.
fn first(program: &Program, count: usize) -> Program {
    let is_alloc = |(_, event): &(usize, &Event)| matches!(event, Event::Alloc { .. });
    let last = program.events.iter().enumerate().filter(is_alloc).nth(count.saturating_sub(1));
    let events = last.map_or(0, |(index, _)| index + 1);
    Program { events: program.events[..events].to_vec(), ..program.clone() }
}

/// A program on a device that may be too small for it.
#[derive(Debug, Serialize)]
pub(super) struct Exhausted {
    trace: String,
    device_bytes: u64,
    refused: bool,
    requested_bytes: Option<u64>,
    pub(super) free_bytes: Option<u64>,
    largest_free_bytes: Option<u64>,
    error: Option<String>,
    advice: Vec<String>,
    /// Live blocks, and how many of them did not read as they were written.
    pub(super) blocks: usize,
    pub(super) damaged: usize,
    /// Whether the request was served after the program had freed its blocks.
    pub(super) served_again: bool,
    pub(super) violations: u64,
    /// The first refusal, if any.
    #[serde(skip)]
    pub(super) report: Option<Box<OomReport>>,
    /// The number of the refused allocation or free, from 1.
    #[serde(skip)]
    pub(super) event: u64,
    #[serde(skip)]
    pub(super) map: Map,
}

/// Plays the program until a request is refused.
pub(super) fn exhausted(session: &Session, program: &Program, device_bytes: u64) -> Result<Exhausted, Failure> {
    let device = session.open_with_capacity(device_bytes)?;
    let mut stage = Stage::new(session, &device, &classical(), program.streams.len())?.filling();
    let mut player = Player::new(program);
    player.play(&mut stage, OnOom::Stop)?;
    let map = Map::of(&stage.allocator, &stage.streams)?;
    let (blocks, damaged) = stage.damaged()?;
    drop(player);
    let report = stage.first_oom.take();
    let again = report.as_ref().map(|report| stage.allocator.alloc_bytes(report.requested, &stage.streams[0]));
    let served_again = again.is_some_and(|again| again.is_ok());
    let free = |report: &OomReport| report.memory.map_or(0, |memory| memory.free);
    Ok(Exhausted {
        trace: program.name.clone(),
        device_bytes,
        refused: report.is_some(),
        requested_bytes: report.as_ref().map(|report| report.requested),
        free_bytes: report.as_ref().map(|report| report.free_in_pool + free(report)),
        largest_free_bytes: report.as_ref().map(|report| report.largest_free.max(free(report))),
        error: report.as_ref().map(|report| report.to_string().lines().next().unwrap_or_default().to_owned()),
        advice: report.iter().flat_map(|report| &report.advice).map(ToString::to_string).collect(),
        blocks,
        damaged,
        served_again,
        violations: violations(session, &program.name, &device),
        report,
        event: first(program, stage.requests).operations(),
        map,
    })
}

/// A program whose free memory moves where it is needed.
#[derive(Debug, Serialize)]
pub(super) struct Moving {
    trace: String,
    device_bytes: u64,
    refused: bool,
    pub(super) peak_reserved_bytes: u64,
    reserved_over_requested: Option<f64>,
    pub(super) remaps: u64,
    pub(super) granules_moved: u64,
    pub(super) damaged: usize,
    pub(super) violations: u64,
    /// What lay where when most was held.
    #[serde(skip)]
    pub(super) map: Option<Map>,
    /// Why memory does not move, if it does not.
    #[serde(skip)]
    pub(super) why_segments: Option<String>,
    /// The refusal that ended it, if any.
    #[serde(skip)]
    pub(super) report: Option<Box<OomReport>>,
}

/// Plays the program with the default options, until a request is refused or it ends. Blocks have
/// known contents; blocks that are live after half of the requests are verified then.
pub(super) fn moving(session: &Session, program: &Program, device_bytes: u64) -> Result<Moving, Failure> {
    let device = session.open_with_capacity(device_bytes)?;
    let mut stage = Stage::new(session, &device, &ConfigArg::default(), program.streams.len())?.filling();
    let requests = program.events.iter().filter(|event| matches!(event, Event::Alloc { .. })).count();
    let half = first(program, requests / 2);
    let mut player = Player::new(&half);
    player.play(&mut stage, OnOom::Stop)?;
    let (_, damaged) = stage.damaged()?;
    drop(player);
    Player::new(program).play(&mut stage, OnOom::Stop)?;
    let stats = stage.allocator.stats();
    let (report, reserved) = (stage.first_oom.take(), stats.reserved_bytes.all.peak);
    let buckets = Profile::of(program).buckets;
    let sampled = sample(&session.resized(device_bytes), program, &ConfigArg::default(), &buckets, Some(&[]))?;
    Ok(Moving {
        trace: program.name.clone(),
        device_bytes,
        refused: report.is_some(),
        peak_reserved_bytes: reserved,
        reserved_over_requested: ratio(reserved, program.peak_requested_bytes),
        remaps: stats.remaps,
        granules_moved: stats.granules_moved,
        damaged,
        violations: violations(session, &program.name, &device),
        map: sampled.fullest,
        why_segments: stage.allocator.why_segments().map(ToString::to_string),
        report,
    })
}

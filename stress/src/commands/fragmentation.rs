//! `fragmentation`: programs that fragment memory, under several policies side by side.

use aquifer_allocator::Bytes;
use aquifer_device::Device;
use serde::Serialize;

use crate::cli::{ConfigArg, FragmentationArgs};
use crate::commands::replay::hazards;
use crate::exit::{Failure, Outcome};
use crate::harness::{OnOom, Player};
use crate::map::{Map, Style};
use crate::room::Room;
use crate::scenarios::{self, Scenario};
use crate::session::Session;
use crate::stage::Stage;
use crate::subject::{Refused, Subject};
use crate::table::table;
use crate::text::wrap;

/// The classical way: memory that stays where it is.
const SEGMENTS: &str = "backing:segments";

/// Policies for every scenario.
const POLICIES: [&str; 6] = [
    SEGMENTS,
    "backing:segments,max_split_size_mb:128",
    "backing:segments,roundup_power2_divisions:8",
    "backing:segments,garbage_collection_threshold:0.8",
    "no_cache:True",
    "",
];

/// Policies for scenarios with several streams.
const STREAM_POLICIES: [&str; 5] =
    ["backing:segments,cross_stream:off", SEGMENTS, "backing:segments,cross_stream:wait", "no_cache:True", ""];

/// A row of results. `fragmentation --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub scenario: &'static str,
    pub policy: String,
    pub device: String,
    pub peak_requested_bytes: u64,
    pub peak_allocated_bytes: u64,
    pub peak_reserved_bytes: u64,
    pub allocated_bytes: u64,
    pub reserved_bytes: u64,
    pub free_bytes: u64,
    pub largest_free_bytes: u64,
    pub unusable_index: f64,
    pub request_bytes: u64,
    pub probe_fits: bool,
    pub ooms: u64,
    pub retries: u64,
    pub driver_allocs: u64,
    pub cross_stream_reuses: u64,
    pub inputs: u64,
    pub inputs_damaged: u64,
    pub hazards: u64,
    pub verdict: String,
}

/// Runs the command.
///
/// # Errors
/// When there is no such scenario, the device cannot be opened, the allocator fails, or standard output cannot be written.
pub fn run(session: &Session, args: &FragmentationArgs) -> Result<Outcome, Failure> {
    if args.list {
        return list(session);
    }
    let style = Style::of_stdout(args.ascii);
    let mut outcome = Outcome::Done;
    for scenario in chosen(&args.scenarios)? {
        let policies = policies(session, &scenario)?;
        let bar = session.progress(policies.len() as u64, scenario.name);
        let mut table = table(&COLUMNS, 1).ending_in_text();
        let mut maps = Vec::new();
        let mut needs = String::new();
        for policy in &policies {
            let (row, map) = experiment(session, &scenario, policy)?;
            bar.inc(1);
            if row.inputs_damaged > 0 {
                outcome = outcome.max(Outcome::Failed);
            }
            if row.hazards > 0 {
                outcome = Outcome::Hazards;
            }
            session.row(&row)?;
            table.add_row(cells(&row));
            if args.maps || row.policy == SEGMENTS {
                maps.push(format!("In the end, under {}:\n{}\n", name(&row.policy), map.draw(style)));
            }
            needs = format!(
                "It uses up to {} at once, and its last request is for {}.",
                Bytes(row.peak_requested_bytes),
                Bytes(row.request_bytes)
            );
        }
        bar.finish_and_clear();
        let told = format!("{}: {}. {needs}", scenario.name, scenario.summary);
        session.show(format_args!("{}\n\n{table}\n\n{}", wrap(&told, style.width), maps.join("\n")))?;
    }
    Ok(outcome)
}

fn list(session: &Session) -> Result<Outcome, Failure> {
    #[derive(Serialize)]
    struct Listed {
        scenario: &'static str,
        summary: &'static str,
    }
    for Scenario { name, summary, .. } in scenarios::ALL {
        session.row(&Listed { scenario: name, summary })?;
        session.show(format_args!("{name:<12} {summary}"))?;
    }
    Ok(Outcome::Done)
}

/// The scenarios with these names; all if there are none.
fn chosen(names: &[String]) -> Result<Vec<Scenario>, Failure> {
    let find = |name: &String| scenarios::ALL.into_iter().find(|scenario| scenario.name == name);
    let unknown = |name: &String| {
        let known: Vec<&str> = scenarios::ALL.iter().map(|scenario| scenario.name).collect();
        Failure::Usage(format!("there is no scenario {name:?}; there are {}", known.join(", ")))
    };
    match names {
        [] => Ok(scenarios::ALL.to_vec()),
        names => names.iter().map(|name| find(name).ok_or_else(|| unknown(name))).collect(),
    }
}

/// The policies that a scenario is run under: the built-in ones, then those that the user gave.
fn policies(session: &Session, scenario: &Scenario) -> Result<Vec<ConfigArg>, Failure> {
    let built_in = if scenario.streams { &STREAM_POLICIES[..] } else { &POLICIES };
    let parsed = built_in.iter().map(|text| text.parse::<ConfigArg>());
    let mut policies = parsed.collect::<Result<Vec<_>, _>>().map_err(|error| Failure::Usage(error.to_string()))?;
    for config in session.configs() {
        if policies.iter().all(|policy| policy.config != config.config) {
            policies.push(config.clone());
        }
    }
    Ok(policies)
}

/// Plays a scenario under a policy, looks at what is left, and makes the request.
fn experiment(session: &Session, scenario: &Scenario, policy: &ConfigArg) -> Result<(Row, Map), Failure> {
    let device: Device = session.open()?;
    let setup = scenario.setup(device.memory_info()?.free, session.seed());
    let mut stage = Stage::new(session, &device, policy, setup.program.streams.len())?.fed()?;
    let mut player = Player::new(&setup.program);
    let ooms = player.play(&mut stage, OnOom::Skip)?;

    let stats = stage.allocator.memory_stats();
    let room = Room::of(&stage.allocator, &stage.streams[usize::from(setup.probe_stream)])?;
    let map = Map::of(&stage.allocator)?;
    let probe_fits = match stage.alloc(setup.probe, setup.probe_stream) {
        Ok(probe) => {
            stage.free(probe);
            true
        }
        Err(Refused::OutOfMemory) => false,
        Err(Refused::Failed(error)) => return Err(*error),
    };
    let after = stage.allocator.memory_stats();
    let (inputs, inputs_damaged) = stage.inputs()?;
    let mut row = Row {
        scenario: scenario.name,
        policy: policy.text.clone(),
        device: session.device_text().to_owned(),
        peak_requested_bytes: setup.program.peak_requested_bytes,
        peak_allocated_bytes: stats.allocated_bytes.all.peak,
        peak_reserved_bytes: stats.reserved_bytes.all.peak,
        allocated_bytes: stats.allocated_bytes.all.current,
        reserved_bytes: stats.reserved_bytes.all.current,
        free_bytes: room.free(),
        largest_free_bytes: room.largest(),
        unusable_index: (room.unusable(setup.probe) * 1e4).round() / 1e4,
        request_bytes: setup.probe,
        probe_fits,
        ooms,
        retries: after.num_alloc_retries,
        driver_allocs: after.num_device_alloc,
        cross_stream_reuses: after.cross_stream_reuses,
        inputs,
        inputs_damaged,
        hazards: hazards(session, scenario.name, &device),
        verdict: String::new(),
    };
    row.verdict = verdict(&row, &room);
    Ok((row, map))
}

/// What the figures say.
fn verdict(row: &Row, room: &Room) -> String {
    let (free, largest, foreign) = (Bytes(row.free_bytes), Bytes(row.largest_free_bytes), Bytes(room.foreign));
    let probe = match () {
        () if row.probe_fits => "fits".to_owned(),
        () if row.free_bytes < row.request_bytes => format!("full: {free} free"),
        () if row.free_bytes - room.foreign < row.request_bytes => {
            format!("stuck: {free} free, {foreign} of it with other streams")
        }
        () if row.largest_free_bytes >= row.request_bytes => {
            format!("kept back: {free} free, largest piece {largest}, which the options keep for other requests")
        }
        () => format!("fragmented: {free} free, largest piece {largest}"),
    };
    match (row.ooms, row.retries) {
        (0, 0) => probe,
        (0, _) if !row.probe_fits => probe,
        (0, 1) => format!("{probe}, after flushing the cache once"),
        (0, retries) => format!("{probe}, after flushing the cache {retries} times"),
        (1, _) => format!("1 request refused before; {probe}"),
        (ooms, _) => format!("{ooms} requests refused before; {probe}"),
    }
}

/// What a policy is called in tables.
fn name(policy: &str) -> &str {
    if policy.is_empty() { "the defaults" } else { policy }
}

const COLUMNS: [&str; 8] =
    ["policy", "reserved", "live in the end", "free", "largest piece", "unusable", "cuMemAlloc", "last request"];

fn cells(row: &Row) -> [String; 8] {
    let bytes = |bytes| Bytes(bytes).to_string();
    [
        name(&row.policy).to_owned(),
        bytes(row.peak_reserved_bytes),
        bytes(row.allocated_bytes),
        bytes(row.free_bytes),
        bytes(row.largest_free_bytes),
        format!("{:.1} %", row.unusable_index * 100.0),
        row.driver_allocs.to_string(),
        row.verdict.clone(),
    ]
}

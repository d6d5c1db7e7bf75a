//! Advice in the reports of random programs is true: a program that follows all of it is served,
//! and its bounds hold.

use aquifer::device::Capture;
use aquifer_tests::prelude::*;

const FD: HandleKind = HandleKind::PosixFd;

/// What a program asks for at its end.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    Block,
    BlockOfPool,
    Exportable,
    Growth,
}

/// A program up to that request, and all that it holds.
struct Scene {
    /// Ends first.
    capture: Option<Capture>,
    bench: Bench,
    pool: Option<PrivatePool>,
    live: Vec<Allocation>,
    in_pool: Vec<Allocation>,
    shared: Vec<Exportable>,
    pins: Vec<PinnedMapping>,
    cache: Option<Growable>,
    others: u64,
    wanted: Wanted,
    bytes: u64,
    no_split: bool,
}

fn options(draw: &mut impl FnMut(u64) -> u64) -> String {
    let mut options = Vec::new();
    let (limit, headroom) = (20 + draw(200), draw(60));
    options.extend((draw(3) == 0).then(|| format!("limit_mb:{limit}")));
    options.extend((draw(3) == 0).then(|| format!("headroom_mb:{headroom}")));
    options.extend((draw(5) == 0).then(|| "throw_on_cudamalloc_oom:True".to_owned()));
    options.extend((draw(4) == 0).then(|| "frame_mb:16".to_owned()));
    options.extend(match draw(6) {
        0 | 1 => Some("cross_stream:off".to_owned()),
        2 | 3 => Some("granule_mb:8".to_owned()),
        _ => None,
    });
    options.join(",")
}

fn size(draw: &mut impl FnMut(u64) -> u64) -> u64 {
    match draw(4) {
        0 => 1 + draw(MIB),
        1 => MIB + draw(9 * MIB),
        2 => 1 + draw(40 * MIB),
        _ => 1 + draw(4 * MIB),
    }
}

impl Scene {
    fn empty(bench: Bench, wanted: Wanted, bytes: u64, no_split: bool) -> Scene {
        let options = PoolOptions { no_split, ..PoolOptions::default() };
        let pool = Some(bench.allocator.create_pool(options).unwrap());
        let cache = bench.allocator.growable(1 << 40, &bench.stream).ok();
        let (live, in_pool, shared, pins) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Scene { capture: None, bench, pool, live, in_pool, shared, pins, cache, others: 0, wanted, bytes, no_split }
    }

    /// The same for a seed, but that others hold as much more as the device is larger.
    fn new(seed: u64, larger: u64) -> Scene {
        let mut draw = random::draws(seed * 7919 + 1);
        let (backing, capacity) = (BACKINGS[usize::from(draw(2) == 0)], (64 + 32 * draw(6)) * MIB);
        let bench = Bench::new(capacity + larger, &on(backing, &options(&mut draw)));
        let mut scene = Scene::empty(bench, Wanted::Block, 0, draw(5) == 0);
        scene.others_hold(if draw(3) == 0 { draw(40) * MIB } else { 0 } + larger);
        let (pins, pool) = (draw(3) == 0, draw(2) == 0);
        (0..draw(50)).for_each(|_| scene.step(&mut draw, pins, pool));
        scene.wanted = match draw(8) {
            0 if pool => Wanted::BlockOfPool,
            1 => Wanted::Exportable,
            2 if scene.cache.is_some() => Wanted::Growth,
            _ => Wanted::Block,
        };
        scene.bytes = if draw(6) == 0 { 1 + draw(400 * MIB) } else { size(&mut draw) * (1 + draw(4)) };
        if let (Wanted::Growth, Some(cache)) = (scene.wanted, &scene.cache) {
            scene.bytes += cache.bytes();
        }
        match seed % 5 {
            3 => scene.capture = Some(scene.bench.side.begin_capture().unwrap()),
            4 => {
                scene.capture = Some(scene.bench.stream.begin_capture().unwrap());
                scene.wanted = Wanted::BlockOfPool;
            }
            _ => {}
        }
        scene
    }

    fn step(&mut self, draw: &mut impl FnMut(u64) -> u64, pins: bool, pool: bool) {
        let Bench { allocator, stream, side, .. } = &self.bench;
        let (kind, bytes, at) = (draw(12), size(draw), draw(1000));
        let stream = if draw(2) == 0 { stream } else { side };
        match (kind, &self.pool, &mut self.cache) {
            (0..4, ..) if !self.live.is_empty() => {
                let at = usize::try_from(at).unwrap() % self.live.len();
                drop(self.live.swap_remove(at));
            }
            (4, ..) => drop(self.in_pool.pop()),
            (5 | 6, Some(from), _) if pool => self.in_pool.extend(from.alloc_bytes(bytes, stream)),
            (7, ..) if pins => self.pins.extend(self.live.last().map(|block| allocator.pin_mapping(block).unwrap())),
            (8, ..) if at.is_multiple_of(3) => self.shared.extend(allocator.alloc_exportable(bytes, FD, stream)),
            (9, _, Some(cache)) if at.is_multiple_of(2) => drop(cache.grow_to(cache.bytes() + bytes, stream)),
            _ => self.live.extend(allocator.alloc_bytes(bytes, stream)),
        }
    }

    fn others_hold(&mut self, bytes: u64) {
        self.others = bytes;
        self.bench.driver.set_other_process_bytes(bytes);
    }

    fn request(&mut self) -> Result<(), AllocError> {
        let Bench { allocator, stream, .. } = &self.bench;
        match (self.wanted, &self.pool, &mut self.cache) {
            (Wanted::Growth, _, Some(cache)) => cache.grow_to(self.bytes, stream),
            (Wanted::BlockOfPool, Some(pool), _) => pool.alloc_bytes(self.bytes, stream).map(drop),
            (Wanted::Exportable, ..) => allocator.alloc_exportable(self.bytes, FD, stream).map(drop),
            _ => allocator.alloc_bytes(self.bytes, stream).map(drop),
        }
    }

    /// Follows a piece of advice; false where that takes another program.
    fn follow(&mut self, advice: &Advice, report: &OomReport) -> bool {
        match advice {
            Advice::RaiseLimit { .. } => self.bench.allocator.set_limit(None),
            // As much less is free for it all, as others hold more: see `Scene::new`.
            Advice::LowerHeadroom { .. } => self.others_hold(self.others - report.headroom),
            Advice::OthersHold { .. } => self.others_hold(0),
            Advice::AfterCapture { .. } => self.capture = None,
            Advice::DropGraphs { .. } => (self.capture, self.in_pool) = (None, Vec::new()),
            Advice::ReleasePools { .. } => (self.pool, self.in_pool) = (None, Vec::new()),
            Advice::EndPins { .. } => self.pins.clear(),
            Advice::FreeAddresses { .. } => (self.cache, self.shared) = (None, Vec::new()),
            Advice::FreeMore { .. } => {
                (self.live, self.shared) = (Vec::new(), Vec::new());
                match self.wanted {
                    Wanted::BlockOfPool => (self.in_pool, self.cache) = (Vec::new(), None),
                    Wanted::Growth => {}
                    Wanted::Block | Wanted::Exportable => self.cache = None,
                }
            }
            Advice::EmptyPool { .. } | Advice::EmptyCache { .. } | Advice::UseSegments | Advice::Retry => {}
            _ => return false,
        }
        true
    }

    /// Frees live blocks, the oldest first, until the request is served. Returns the bytes freed,
    /// or `None` if that does not help.
    fn free_until_served(&mut self) -> Option<u64> {
        let before = self.bench.allocator.memory_allocated();
        loop {
            let live = self.bench.allocator.memory_allocated();
            if self.request().is_ok() {
                return Some(before - live);
            }
            if self.live.is_empty() {
                return None;
            }
            drop(self.live.remove(0));
        }
    }
}

/// What becomes of the request of a program once all of the advice on it is followed; `None` where
/// that takes another program.
fn followed(seed: u64, report: &OomReport) -> Option<Result<(), AllocError>> {
    let lowers = report.advice.iter().any(|advice| matches!(advice, Advice::LowerHeadroom { .. }));
    let mut scene = Scene::new(seed, if lowers { report.headroom } else { 0 });
    let again = scene.request();
    let needs = |report: &OomReport| (report.from_device, report.reserved);
    if again.as_ref().err().and_then(AllocError::report).is_none_or(|again| needs(again) != needs(report)) {
        // A larger device gives more addresses, so that memory lies elsewhere, and more of it is
        // taken ahead of need.
        assert!(lowers, "{seed}: {report}\nand the next time {again:?}");
        return None;
    }
    for advice in &report.advice {
        if let Advice::LargerDevice { bytes } = advice {
            let config = scene.bench.allocator.config().clone();
            scene = Scene::empty(Bench::with(Subject::new(*bytes), config), scene.wanted, scene.bytes, scene.no_split);
        } else if !scene.follow(advice, report) {
            return None;
        }
    }
    // Last, as caches hold the memory that was freed.
    for advice in &report.advice {
        match (advice, &scene.pool) {
            (Advice::EmptyPool { .. } | Advice::DropGraphs { .. }, Some(pool)) => drop(pool.empty_cache().unwrap()),
            (Advice::EmptyCache { .. }, _) => drop(scene.bench.allocator.empty_cache().unwrap()),
            _ => {}
        }
    }
    Some(scene.request())
}

#[test]
fn programs_that_follow_all_advice_are_served() {
    let (programs, mut followed_by, mut failed) = (Subject::share(800), 0, Vec::new());
    for seed in 0..programs {
        let Err(error) = Scene::new(seed, 0).request() else { continue };
        let report = error.report().unwrap_or_else(|| panic!("{seed}: {error}"));
        match followed(seed, report) {
            Some(Err(then)) => failed.push(format!("{seed}: {report}\nall was followed, and then {then}")),
            Some(Ok(())) => followed_by += 1,
            None => {}
        }
    }
    assert!(failed.is_empty(), "{} of {followed_by}:\n{}", failed.len(), failed.join("\n"));
    assert!(followed_by > programs / 8, "{followed_by} programs followed");
}

#[test]
fn less_than_the_least_to_be_freed_never_suffices() {
    let (programs, mut bounds) = (Subject::share(800), 0);
    for seed in 0..programs {
        let mut scene = Scene::new(seed, 0);
        let Err(error) = scene.request() else { continue };
        let report = error.report().unwrap_or_else(|| panic!("{seed}: {error}"));
        let least = report.advice.iter().find_map(|advice| match advice {
            Advice::FreeMore { least, .. } => Some(*least),
            _ => None,
        });
        let Some((least, freed)) = least.zip(scene.free_until_served()) else { continue };
        assert!(freed >= least, "{seed}: served after {freed} bytes were freed: {report}");
        bounds += u64::from(least > 0);
    }
    assert!(bounds >= programs / 100, "{bounds} bounds tried");
}

//! The options of PyTorch's allocator, and the size rules that follow from them.

use aquifer::memory::Config;
use aquifer_allocator::config::{Backing, IgnoredOption};

use super::{SMALL_MAX, SMALL_SEGMENT, UNIT};

/// The smallest request with a segment of its own. Those between [`SMALL_MAX`] and this share
/// segments of `large_segment` bytes.
const OWN_SEGMENT_MIN: u64 = 10 << 20;
/// The size of a segment of its own is a multiple of this.
const SEGMENT_STEP: u64 = 2 << 20;
/// Requests from this size on are refused at once.
const REQUEST_LIMIT: u64 = 1 << 60;
/// The largest segment that may be asked for.
const LARGE_SEGMENT_MAX: u64 = 1 << 40;
/// Intervals of `roundup_power2_divisions`: from 1, 2, 4, … 32768 MiB on.
const INTERVALS: usize = 16;

const MIB: u64 = 1 << 20;

/// Options of this project's allocator, which mean nothing in PyTorch.
const OWN: [&str; 11] = [
    "backing",
    "granule_mb",
    "frame_mb",
    "split_frames",
    "cross_stream",
    "headroom_mb",
    "reserve_mb",
    "history",
    "oom_snapshot",
    "tags",
    "no_cache",
];

/// The options that decide which memory PyTorch's allocator takes and hands out. Limits are not
/// among them: they are those of this project's allocator.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Segments grow by pages: see `pages.rs`.
    pub expandable_segments: bool,
    /// Bytes of the segments that requests from 1 to 10 MiB share.
    pub(super) large_segment: u64,
    /// Blocks of at least this many bytes are *oversize*: never split, and only for requests of at
    /// least this size. `u64::MAX` if none are.
    pub(super) max_split: u64,
    /// An oversize request takes only blocks that are less than this much larger.
    pub(super) max_non_split_rounding: u64,
    /// The share of the limit above which unused segments are released by age; 0 is off.
    pub(super) gc_threshold: f64,
    /// A request that the limit does not allow is refused at once.
    pub(super) throws_at_limit: bool,
    /// Steps between a power of two and the next, to which requests are rounded up, by interval.
    divisions: [u64; INTERVALS],
}

impl Default for Options {
    fn default() -> Options {
        Options {
            expandable_segments: false,
            large_segment: 20 * MIB,
            max_split: u64::MAX,
            max_non_split_rounding: 20 * MIB,
            gc_threshold: 0.0,
            throws_at_limit: false,
            divisions: [0; INTERVALS],
        }
    }
}

impl Options {
    /// Reads options that ask for a model with `backing:pytorch`, or with `backing:expandable`,
    /// which adds `expandable_segments:True`; `None` if they do not. The others are as in
    /// `PYTORCH_ALLOC_CONF`. Also returns the configuration of this project's allocator that they
    /// give, of which the limits count.
    ///
    /// # Errors
    /// When an option is not PyTorch's, or has no such value.
    pub fn parse_model(text: &str) -> Result<Option<(Options, Config)>, String> {
        let model = |pair| match named(pair) {
            ("backing", "pytorch") => Some(""),
            ("backing", "expandable") => Some("expandable_segments:True"),
            _ => None,
        };
        if !pairs(text).any(|pair| model(pair).is_some()) {
            return Ok(None);
        }
        let options = pairs(text).map(|pair| model(pair).unwrap_or(pair)).filter(|pair| !pair.is_empty());
        let options: Vec<&str> = options.collect();
        Options::parse(&options.join(",")).map(Some)
    }

    fn parse(text: &str) -> Result<(Options, Config), String> {
        if let Some((own, _)) = pairs(text).map(named).find(|(name, _)| OWN.contains(name)) {
            return Err(format!("{own} is not an option of PyTorch's allocator"));
        }
        let config = Config::parse(text).map_err(|error| error.to_string())?;
        let mut options = Options { throws_at_limit: config.fail_fast, ..Options::default() };
        let mut rounding = None;
        for IgnoredOption { key, value, .. } in config.ignored(Backing::Paged) {
            let invalid = || format!("invalid value for {key}: {value}");
            let mib = || value.parse::<u64>().map(|mib| mib.saturating_mul(MIB)).map_err(|_| invalid());
            match key {
                "expandable_segments" if value == "True" => options.expandable_segments = true,
                "expandable_segments" => return Err(invalid()),
                "large_segment_size_mb" => options.large_segment = mib()?,
                "max_split_size_mb" => options.max_split = mib()?,
                "max_non_split_rounding_mb" => rounding = Some(mib()?),
                "garbage_collection_threshold" => {
                    let share = value.parse().ok().filter(|share| *share > 0.0 && *share < 1.0);
                    options.gc_threshold = share.ok_or_else(invalid)?;
                }
                "roundup_power2_divisions" => options.divisions = divisions(&value).ok_or_else(invalid)?,
                _ => {}
            }
        }
        let least = options.large_segment;
        if !(OWN_SEGMENT_MIN + 1..=LARGE_SEGMENT_MAX).contains(&least) {
            return Err(format!("invalid value for large_segment_size_mb: {}", least / MIB));
        }
        options.max_non_split_rounding = rounding.unwrap_or(least);
        let (split, rounding) = (options.max_split, options.max_non_split_rounding);
        for (name, bytes) in [("max_split_size_mb", split), ("max_non_split_rounding_mb", rounding)] {
            if bytes < least {
                return Err(format!("invalid value for {name}: less than large_segment_size_mb, {}", least / MIB));
            }
        }
        if options.expandable_segments && options != (Options { expandable_segments: true, ..Options::default() }) {
            return Err("expandable segments are reproduced without other options".to_owned());
        }
        Ok((options, config))
    }

    /// The size of the block for a request; `None` if it is refused whatever the device has.
    #[inline]
    pub(super) fn round(&self, bytes: u64) -> Option<u64> {
        if bytes >= REQUEST_LIMIT {
            return None;
        }
        let log2 = bytes.max(1).ilog2();
        let interval = log2.saturating_sub(SMALL_MAX.ilog2()) as usize;
        let divisions = self.divisions[interval.min(INTERVALS - 1)];
        // As in PyTorch, one division is the same as none.
        if divisions <= 1 || bytes.div_ceil(UNIT) <= divisions {
            return Some(bytes.max(1).next_multiple_of(UNIT));
        }
        Some(bytes.next_multiple_of((1 << log2) / divisions))
    }

    /// The size of the segment that is taken from the device for a block.
    pub(super) fn segment_bytes(&self, size: u64) -> u64 {
        match size {
            _ if size <= SMALL_MAX => SMALL_SEGMENT,
            _ if size < OWN_SEGMENT_MIN => self.large_segment,
            _ => size.next_multiple_of(SEGMENT_STEP),
        }
    }

    /// The segment that is taken from the device for a request.
    pub fn segment_of_request(&self, bytes: u64) -> u64 {
        self.round(bytes).map_or(bytes, |size| self.segment_bytes(size))
    }

    /// Whether the rest of a block becomes a free block when `size` bytes of it are taken.
    #[inline]
    pub(super) fn splits(&self, block: u64, size: u64) -> bool {
        let rest = block - size;
        if size <= SMALL_MAX || self.expandable_segments {
            rest >= UNIT
        } else {
            size < self.max_split && rest > SMALL_MAX
        }
    }

    /// Whether the smallest free block that is large enough may serve a request.
    #[inline]
    pub(super) fn fits(&self, block: u64, size: u64) -> bool {
        if size < self.max_split { block < self.max_split } else { block - size < self.max_non_split_rounding }
    }
}

/// The options of a list, which are separated by commas outside of brackets.
fn pairs(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let between = move |letter: char| {
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        letter == ',' && depth == 0
    };
    text.split(between).map(str::trim).filter(|pair| !pair.is_empty())
}

/// An option's name and value.
fn named(pair: &str) -> (&str, &str) {
    pair.split_once(':').map_or((pair, ""), |(name, value)| (name.trim(), value.trim()))
}

/// One number for all intervals, or a list such as `[256:1,512:2,>:4]`. The first entry of a list
/// also holds for smaller sizes, and `>` for all sizes above the entry before it. `None` if a number
/// is no power of two.
fn divisions(text: &str) -> Option<[u64; INTERVALS]> {
    let number = |text: &str| text.parse().ok().filter(|&number: &u64| number == 0 || number.is_power_of_two());
    let Some(list) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) else {
        return Some([number(text)?; INTERVALS]);
    };
    let (mut all, mut last) = ([0; INTERVALS], None);
    for (size, value) in list.split(',').map(named) {
        if size == ">" {
            all[last.map_or(1, |last: usize| last + 1)..].fill(number(value)?);
            continue;
        }
        let interval = (number(size)?.max(1).ilog2() as usize).min(INTERVALS - 1);
        let from = if last.is_none() { 0 } else { interval };
        all[from..=interval].fill(number(value)?);
        last = Some(interval);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn options(text: &str) -> Options {
        Options::parse(text).unwrap().0
    }

    #[test]
    fn requests_are_rounded_to_units_or_steps() {
        let rounded = |text: &str, vectors: &[(u64, u64)]| {
            let options = options(text);
            for &(bytes, size) in vectors {
                assert_eq!(options.round(bytes), Some(size), "{text}: {bytes}");
            }
            assert_eq!(options.round(REQUEST_LIMIT), None);
        };
        rounded("", &[(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512), (REQUEST_LIMIT - 1, REQUEST_LIMIT)]);
        // Up to 512 bytes times the divisions, these have no effect.
        rounded("roundup_power2_divisions:4", &[(1200, 1536), (2048, 2048), (2049, 2560), (84 * MIB, 96 * MIB)]);
        rounded("roundup_power2_divisions:4", &[(128 * MIB, 128 * MIB), (REQUEST_LIMIT - 1, REQUEST_LIMIT)]);
        let list = "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]";
        rounded(list, &[(MIB + 1, MIB + 128 * 1024), (84 * MIB, 88 * MIB), (300 * MIB, 384 * MIB)]);
        rounded(list, &[(GIB + 1, GIB + 512)]);
        rounded("roundup_power2_divisions:[32768:2]", &[(33 * GIB, 48 * GIB), (1025 * GIB, 1536 * GIB)]);
        rounded("roundup_power2_divisions:[256:1,512:2,>:4]", &[(MIB + 1, MIB + 512), (1025 * MIB, 1280 * MIB)]);
        rounded(&format!("roundup_power2_divisions:{}", 1_u64 << 52), &[(84 * MIB + 1, 84 * MIB + 512)]);
    }

    #[test]
    fn segments_have_the_size_of_their_pool_or_of_the_request() {
        let sizes = [MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 10 * MIB + 512, 129 * MIB + 512];
        let segments = |text: &str| sizes.map(|size| options(text).segment_bytes(size) / MIB);
        assert_eq!(segments(""), [2, 20, 20, 10, 12, 130]);
        assert_eq!(segments("large_segment_size_mb:64"), [2, 64, 64, 10, 12, 130]);
    }

    #[test]
    fn large_blocks_keep_a_small_rest_and_oversize_ones_serve_only_oversize_requests() {
        let usual = options("");
        assert!(usual.splits(1024, 512) && !usual.splits(512, 512));
        assert!(usual.splits(20 * MIB, 19 * MIB - 512) && !usual.splits(20 * MIB, 19 * MIB));
        assert!(usual.fits(100 * GIB, 512));
        let limited = options("max_split_size_mb:40");
        assert!(limited.splits(60 * MIB, 40 * MIB - 512) && !limited.splits(60 * MIB, 40 * MIB));
        assert!(limited.fits(40 * MIB - 512, 12 * MIB) && !limited.fits(40 * MIB, 12 * MIB));
        assert!(limited.fits(60 * MIB - 512, 40 * MIB) && !limited.fits(60 * MIB, 40 * MIB));
        let rounding = options("max_split_size_mb:40,max_non_split_rounding_mb:30");
        assert!(rounding.fits(70 * MIB - 512, 40 * MIB) && !rounding.fits(70 * MIB, 40 * MIB));
        let follows = options("large_segment_size_mb:30,max_split_size_mb:40");
        assert!(follows.fits(70 * MIB - 512, 40 * MIB) && !follows.fits(70 * MIB, 40 * MIB));
    }

    #[test]
    fn models_are_asked_for_and_other_options_left() {
        assert_eq!(Options::parse_model("max_split_size_mb:40,limit_mb:9"), Ok(None));
        let (model, others) =
            Options::parse_model(" backing : pytorch , limit_mb:9,pinned_free_catch_all:True").unwrap().unwrap();
        assert_eq!((model, others), (Options::default(), "limit_mb:9,pinned_free_catch_all:True".parse().unwrap()));
        let (model, _) = Options::parse_model("backing:expandable").unwrap().unwrap();
        assert!(model.expandable_segments);
        for odd in [
            "max_split_size_mb:19",
            "max_split_size_mb:1e3",
            "max_split_size_mb",
            "large_segment_size_mb:10",
            "max_non_split_rounding_mb:5",
            "garbage_collection_threshold:1",
            "roundup_power2_divisions:3",
            "roundup_power2_divisions:[3:4]",
            "roundup_power2_divisions:[4:4",
            "throw_on_cudamalloc_oom:1",
            "cross_stream:off",
            "expandable_segments:True,max_split_size_mb:40",
        ] {
            assert!(Options::parse_model(&format!("backing:pytorch,{odd}")).is_err(), "{odd}");
        }
    }
}

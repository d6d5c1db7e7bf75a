//! Values of options as text: numbers, sizes, fractions, and choices, which are listed here.
//!
//! A value is taken as a whole or refused. Numbers have no sign, and nothing after them.

use std::fmt;
use std::path::PathBuf;

/// Bytes in a MiB, the unit of every `_mb` option.
const MIB: f64 = 1048576.0;

/// The type of a field of a [`Config`](super::Config).
pub(super) trait Field: PartialEq + Sized {
    fn read(text: &str) -> Option<Self>;

    /// The text from which it is read.
    fn text(&self) -> String;
}

impl<T: Field> Field for Option<T> {
    fn read(text: &str) -> Option<Option<T>> {
        T::read(text).map(Some)
    }

    fn text(&self) -> String {
        self.as_ref().map(T::text).unwrap_or_default()
    }
}

impl Field for bool {
    fn read(text: &str) -> Option<bool> {
        [("True", true), ("False", false)].into_iter().find(|(name, _)| *name == text).map(|(_, value)| value)
    }

    fn text(&self) -> String {
        if *self { "True" } else { "False" }.to_owned()
    }
}

impl Field for u32 {
    fn read(text: &str) -> Option<u32> {
        if is_digits(text) { text.parse().ok() } else { None }
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// Bytes, given in MiB: a whole number, or a decimal fraction that is whole bytes. It is exact up to
/// 2^53 bytes, and for whole MiB.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a whole number below 2^64; the loss is documented"
)]
impl Field for u64 {
    fn read(text: &str) -> Option<u64> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
        let mib: f64 = if is_digits(whole) && is_digits(fraction) { text.parse().ok()? } else { return None };
        let bytes = mib * MIB;
        (bytes.fract() == 0.0 && bytes < u64::MAX as f64).then_some(bytes as u64)
    }

    fn text(&self) -> String {
        (*self as f64 / MIB).to_string()
    }
}

/// A finite decimal number such as `0.5`, `.5`, `1` or `2e-3`.
impl Field for f64 {
    fn read(text: &str) -> Option<f64> {
        let starts_well = text.starts_with(|first: char| first.is_ascii_digit() || first == '.');
        text.parse().ok().filter(|value: &f64| starts_well && value.is_finite())
    }

    fn text(&self) -> String {
        // A sum, because zero may have a sign, which option strings do not take.
        (self + 0.0).to_string()
    }
}

/// A file whose ending names a format of snapshots.
impl Field for PathBuf {
    fn read(text: &str) -> Option<PathBuf> {
        let path = PathBuf::from(text);
        let ends_in = |ending: &&str| path.extension().is_some_and(|found| found.eq_ignore_ascii_case(ending));
        if ["pickle", "pkl", "json"].iter().any(ends_in) { Some(path) } else { None }
    }

    fn text(&self) -> String {
        self.display().to_string()
    }
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// Every choice, in the order of the documentation.
            pub const ALL: &[$name] = &[$($name::$variant),*];

            /// The word for it in an option string.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $word,)* }
            }
        }

        impl Field for $name {
            fn read(text: &str) -> Option<$name> {
                Self::ALL.iter().copied().find(|choice| choice.name() == text)
            }

            fn text(&self) -> String {
                self.name().to_owned()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

choice! {
    /// Where an allocator's memory comes from: option `backing`.
    Backing {
        /// Physical granules, which are mapped wherever contiguous memory is needed. Where the
        /// device cannot map memory, this falls back to [`Backing::Segments`];
        /// [`crate::Allocator::backing`] tells which is in use.
        #[default]
        Paged = "paged",
        /// Large plain driver allocations, cached and split into blocks.
        Segments = "segments",
    }
}

choice! {
    /// Whether a stream may take blocks that were last freed on another stream: option
    /// `cross_stream`.
    CrossStream {
        /// Never, as in PyTorch: each stream reuses only its own blocks.
        Off = "off",
        /// A stream may take blocks whose last use is known to be done, or is already ordered
        /// before the stream; no wait is inserted.
        #[default]
        Ready = "ready",
        /// A stream may also take blocks for which it has to wait for the other stream; such waits
        /// are inserted and counted.
        Wait = "wait",
    }
}

choice! {
    /// Whether frames that are partly in use are split before a request is refused for lack of
    /// memory: option `split_frames`, for mapped memory. A frame is physical memory of several
    /// granules with one driver handle.
    ///
    /// Splitting moves live granules to memory of their own, at the same addresses. It waits for
    /// the device, and until it ends nothing may be enqueued that uses them. Access guards of other
    /// threads wait for that; nothing is split while there is one, or a reservation.
    SplitFrames {
        /// Never.
        #[default]
        Off = "off",
        /// Where a request would be refused otherwise. This is a promise: while a request is being
        /// served, no other thread enqueues work on addresses of this allocator without an access
        /// guard, and none of another device that was enqueued before is still running. Memory that
        /// a network card or another process knows by its address is pinned
        /// ([`Allocator::pin_mapping`](crate::Allocator::pin_mapping)).
        On = "on",
    }
}

choice! {
    /// Whether mapped memory saves memory rather than driver time: option `memory_first`.
    MemoryFirst {
        /// While the device has memory to spare, driver calls are saved: some percent more is held
        /// than the program uses at most, a quarter more if most of its memory moves again and again.
        #[default]
        Off = "off",
        /// Less is held from the first, for many more driver calls: for programs that share a
        /// device.
        On = "on",
    }
}

choice! {
    /// Where the names of allocations in statistics and reports come from: option `tags`.
    TagSource {
        /// Allocations have no names.
        Off = "off",
        /// The scopes that the program opens: [`crate::TagScope`].
        #[default]
        Scope = "scope",
        /// The `tracing` span that is entered when the allocation is made.
        Span = "span",
    }
}

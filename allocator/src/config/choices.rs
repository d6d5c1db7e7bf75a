//! The options that are a choice between named ways of working.

use std::fmt;

use super::error::ConfigError;
use super::parse::Word;
use super::values::Field;

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
            fn read(word: Word<'_>) -> Result<$name, ConfigError> {
                Self::ALL.iter().copied().find(|choice| choice.name() == word.text()).ok_or_else(|| word.invalid())
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

//! The modules of device code: PTX text, made from `kernels/cuda` by `ci/ptx` and part of the crate
//! (invariant K3).

macro_rules! modules {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)*) => {
        /// A module of the set.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Module {
            $($(#[$doc])* $variant,)*
        }

        impl Module {
            /// Every module; `ALL[module as usize] == module`.
            pub const ALL: &[Module] = &[$(Module::$variant),*];

            /// The name of its source file, without the ending.
            pub const fn name(self) -> &'static str {
                match self { $(Module::$variant => $name,)* }
            }

            /// Its PTX text.
            pub const fn ptx(self) -> &'static str {
                match self { $(Module::$variant => include_str!(concat!("../ptx/", $name, ".ptx")),)* }
            }
        }
    };
}

modules! {
    /// Arithmetic, element by element.
    Arithmetic = "arithmetic",
    /// Fills and patterns.
    Bytes = "bytes",
    /// Conversion between dtypes.
    Cast = "cast",
    /// Moving elements to other places.
    Layout = "layout",
    /// Matrix products.
    Matmul = "matmul",
    /// Sums.
    Reduce = "reduce",
    /// Keeping a stream busy.
    Spin = "spin",
}

//! One tenant against another: names, places and quotas.

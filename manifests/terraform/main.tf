# The same as manifests/bucket and manifests/cloud-run.yaml, for Terraform; with -var halves=true as
# manifests/cloud-run-halves.yaml.
#   TF_VAR_api_keys=$(openssl rand -hex 24) TF_VAR_admin_key=$(openssl rand -hex 24) TF_VAR_hmac_key=$(openssl rand -hex 32) \
#     terraform apply -var project=my-project -var region=europe-west1 -var image=…

terraform {
  # Write-only arguments: the keys go to Secret Manager and into no state file.
  required_version = ">= 1.11"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 7.0"
    }
  }
}

variable "project" {
  type = string
}

variable "region" {
  type = string
}

variable "image" {
  type        = string
  description = "The image, best by digest"
}

variable "halves" {
  type        = bool
  default     = false
  description = "Two containers: the API without any privilege, and the reconciler beside it"
}

variable "image_api" {
  type        = string
  default     = ""
  description = "The image of the API (--target api); needed with halves"
  validation {
    condition     = !var.halves || var.image_api != ""
    error_message = "halves needs image_api: the same image built with --target api."
  }
}

variable "api_keys" {
  type        = string
  sensitive   = true
  ephemeral   = true
  description = "Keys of which clients must show one, alone or as tenant=key, separated by commas"
}

variable "api_keys_version" {
  type        = number
  default     = 1
  description = "Raise it to have other api_keys stored"
}

variable "admin_key" {
  type        = string
  sensitive   = true
  ephemeral   = true
  description = "Key that opens the list of all sandboxes"
}

variable "admin_key_version" {
  type        = number
  default     = 1
  description = "Raise it to have another admin_key stored"
}

variable "hmac_key" {
  type        = string
  sensitive   = true
  ephemeral   = true
  description = "Keys of 32 bytes or more by which checkpoints and snapshots are signed, the newest first, separated by commas"
}

variable "hmac_key_version" {
  type        = number
  default     = 1
  description = "Raise it to have another hmac_key stored"
}

variable "invokers" {
  type        = list(string)
  default     = []
  description = "Who may call it, such as group:team@example.com; nobody if empty"
}

variable "deletion_protection" {
  type        = bool
  default     = true
  description = "Keep the service, and buckets that are not empty, from being destroyed; apply with false before terraform destroy"
}

variable "max_instances" {
  type    = number
  default = 20
}

provider "google" {
  project = var.project
  region  = var.region
}

resource "google_service_account" "baton" {
  account_id   = "baton"
  display_name = "Runs baton"
}

locals {
  buckets = {
    metadata    = "${var.project}-baton"
    checkpoints = "${var.project}-baton-checkpoints"
  }

  # Each is one container of a shape; the resource below takes those of the shape that is wanted.
  containers = [
    {
      name    = "baton"
      in_half = false
      image   = var.image
      args    = ["serve"]
      cpu     = "2"
      memory  = "2Gi"
      ports   = [8080]
      after   = []
      secrets = ["BATON_API_KEYS", "BATON_ADMIN_KEY", "BATON_HMAC_KEY"]
      env = {
        SANDBOX_METADATA_BUCKET    = local.buckets.metadata
        SANDBOX_CHECKPOINT_BUCKET  = local.buckets.checkpoints
        FILESYSTEM_SNAPSHOT_BUCKET = local.buckets.checkpoints
        BATON_MAX_SANDBOXES        = "1"
        BATON_LIMITS               = "memory=512MiB,pids=512,disk=256MiB,files=4096"
        BATON_DRAIN                = "8s"
        BATON_ROOTFS_CACHE         = "512MiB"
        BATON_ARCHIVE_SIZE         = "1GiB"
        GOOGLE_CLOUD_PROJECT       = var.project
      }
      startup  = { path = "/status", port = 8080 }
      liveness = [{ path = "/", port = 8080 }]
      mounts   = { state = "/run/baton" }
    },
    {
      name    = "api"
      in_half = true
      image   = var.image_api
      args    = ["api"]
      cpu     = "1"
      memory  = "512Mi"
      ports   = [8080]
      after   = ["reconciler"]
      secrets = ["BATON_API_KEYS", "BATON_ADMIN_KEY", "BATON_HMAC_KEY"]
      env = {
        SANDBOX_METADATA_BUCKET    = local.buckets.metadata
        SANDBOX_CHECKPOINT_BUCKET  = local.buckets.checkpoints
        FILESYSTEM_SNAPSHOT_BUCKET = local.buckets.checkpoints
        BATON_MAX_SANDBOXES        = "1"
        BATON_LIMITS               = "memory=512MiB,pids=512,disk=256MiB,files=4096"
        BATON_DRAIN                = "8s"
        BATON_SOCKET_DIR           = "/halves"
        GOOGLE_CLOUD_PROJECT       = var.project
      }
      startup  = { path = "/status", port = 8080 }
      liveness = [{ path = "/", port = 8080 }]
      mounts   = { halves = "/halves" }
    },
    {
      name    = "reconciler"
      in_half = true
      image   = var.image
      args    = ["reconciler"]
      cpu     = "2"
      memory  = "2Gi"
      ports   = []
      after   = []
      secrets = ["BATON_HMAC_KEY"]
      env = {
        SANDBOX_METADATA_BUCKET    = local.buckets.metadata
        SANDBOX_CHECKPOINT_BUCKET  = local.buckets.checkpoints
        FILESYSTEM_SNAPSHOT_BUCKET = local.buckets.checkpoints
        BATON_MAX_SANDBOXES        = "1"
        BATON_LIMITS               = "memory=512MiB,pids=512,disk=256MiB,files=4096"
        BATON_DRAIN                = "8s"
        BATON_SOCKET_DIR           = "/halves"
        GOOGLE_CLOUD_PROJECT       = var.project
        BATON_ROOTFS_CACHE         = "512MiB"
        BATON_ARCHIVE_SIZE         = "1GiB"
        BATON_API_USER             = "65532"
        BATON_ADMIN_LISTEN         = "0.0.0.0:9465"
      }
      startup  = { path = "/healthz", port = 9465 }
      liveness = []
      mounts   = { state = "/run/baton", halves = "/halves" }
    },
  ]

  # Where each variable that is a secret comes from.
  secrets = {
    BATON_API_KEYS = {
      secret  = google_secret_manager_secret.keys.secret_id
      version = google_secret_manager_secret_version.keys.version
    }
    BATON_ADMIN_KEY = {
      secret  = google_secret_manager_secret.admin.secret_id
      version = google_secret_manager_secret_version.admin.version
    }
    BATON_HMAC_KEY = {
      secret  = google_secret_manager_secret.hmac.secret_id
      version = google_secret_manager_secret_version.hmac.version
    }
  }

  volumes = [
    { name = "state", size = "1Gi", for_one = true },
    { name = "halves", size = "1Mi", for_one = false },
  ]
}

resource "google_storage_bucket" "baton" {
  for_each                    = local.buckets
  name                        = each.value
  location                    = var.region
  storage_class               = "STANDARD"
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  force_destroy               = !var.deletion_protection

  versioning {
    enabled = false
  }

  # Locks are rewritten every few seconds: soft delete would keep, and bill, every one of them. Checkpoints are large
  # and replaced often, and of each sandbox BATON_KEEP_CHECKPOINTS are kept anyway.
  soft_delete_policy {
    retention_duration_seconds = 0
  }

  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = 1
      matches_prefix = ["probes/"]
    }
  }

  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 1
    }
  }
}

# Objects of these buckets alone, and no right to change the buckets themselves.
resource "google_storage_bucket_iam_member" "baton" {
  for_each = local.buckets
  bucket   = google_storage_bucket.baton[each.key].name
  role     = "roles/storage.objectUser"
  member   = "serviceAccount:${google_service_account.baton.email}"
}

resource "google_secret_manager_secret" "keys" {
  secret_id = "baton-api-keys"
  replication {
    auto {}
  }
}

resource "google_secret_manager_secret_version" "keys" {
  secret                 = google_secret_manager_secret.keys.id
  secret_data_wo         = var.api_keys
  secret_data_wo_version = var.api_keys_version
  # The instances of the revision before still start with the version they were deployed with.
  deletion_policy = "ABANDON"
}

resource "google_secret_manager_secret_iam_member" "keys" {
  secret_id = google_secret_manager_secret.keys.id
  role      = "roles/secretmanager.secretAccessor"
  member    = "serviceAccount:${google_service_account.baton.email}"
}

resource "google_secret_manager_secret" "admin" {
  secret_id = "baton-admin-key"
  replication {
    auto {}
  }
}

resource "google_secret_manager_secret_version" "admin" {
  secret                 = google_secret_manager_secret.admin.id
  secret_data_wo         = var.admin_key
  secret_data_wo_version = var.admin_key_version
  deletion_policy        = "ABANDON"
}

resource "google_secret_manager_secret_iam_member" "admin" {
  secret_id = google_secret_manager_secret.admin.id
  role      = "roles/secretmanager.secretAccessor"
  member    = "serviceAccount:${google_service_account.baton.email}"
}

resource "google_secret_manager_secret" "hmac" {
  secret_id = "baton-hmac-key"
  replication {
    auto {}
  }
}

resource "google_secret_manager_secret_version" "hmac" {
  secret                 = google_secret_manager_secret.hmac.id
  secret_data_wo         = var.hmac_key
  secret_data_wo_version = var.hmac_key_version
  deletion_policy        = "ABANDON"
}

resource "google_secret_manager_secret_iam_member" "hmac" {
  secret_id = google_secret_manager_secret.hmac.id
  role      = "roles/secretmanager.secretAccessor"
  member    = "serviceAccount:${google_service_account.baton.email}"
}

resource "google_cloud_run_v2_service" "baton" {
  name                = "baton"
  location            = var.region
  ingress             = "INGRESS_TRAFFIC_ALL"
  deletion_protection = var.deletion_protection

  template {
    service_account                  = google_service_account.baton.email
    execution_environment            = "EXECUTION_ENVIRONMENT_GEN2"
    session_affinity                 = true
    max_instance_request_concurrency = 1
    timeout                          = "3600s"

    scaling {
      min_instance_count = 0
      max_instance_count = var.max_instances
    }

    dynamic "containers" {
      for_each = [for one in local.containers : one if one.in_half == var.halves]
      content {
        name       = containers.value.name
        image      = containers.value.image
        args       = containers.value.args
        depends_on = length(containers.value.after) > 0 ? containers.value.after : null

        dynamic "ports" {
          for_each = containers.value.ports
          content {
            name           = "http1"
            container_port = ports.value
          }
        }

        dynamic "env" {
          for_each = containers.value.env
          content {
            name  = env.key
            value = env.value
          }
        }

        dynamic "env" {
          for_each = containers.value.secrets
          content {
            name = env.value
            value_source {
              secret_key_ref {
                secret  = local.secrets[env.value].secret
                version = local.secrets[env.value].version
              }
            }
          }
        }

        resources {
          # Leases are renewed and commands run also while no request is open.
          cpu_idle          = false
          startup_cpu_boost = true
          limits = {
            cpu    = containers.value.cpu
            memory = containers.value.memory
          }
        }

        startup_probe {
          http_get {
            path = containers.value.startup.path
            port = containers.value.startup.port
          }
          period_seconds    = 1
          timeout_seconds   = 1
          failure_threshold = 60
        }

        dynamic "liveness_probe" {
          for_each = containers.value.liveness
          content {
            http_get {
              path = liveness_probe.value.path
              port = liveness_probe.value.port
            }
            period_seconds    = 10
            timeout_seconds   = 5
            failure_threshold = 3
          }
        }

        dynamic "volume_mounts" {
          for_each = containers.value.mounts
          content {
            name       = volume_mounts.key
            mount_path = volume_mounts.value
          }
        }
      }
    }

    dynamic "volumes" {
      for_each = [for one in local.volumes : one if one.for_one || var.halves]
      content {
        name = volumes.value.name
        empty_dir {
          medium     = "MEMORY"
          size_limit = volumes.value.size
        }
      }
    }
  }

  # A revision whose account may not read its secret yet does not start.
  depends_on = [
    google_secret_manager_secret_iam_member.keys,
    google_secret_manager_secret_iam_member.admin,
    google_secret_manager_secret_iam_member.hmac,
    google_storage_bucket_iam_member.baton,
  ]
}

resource "google_cloud_run_v2_service_iam_member" "invoker" {
  for_each = toset(var.invokers)
  name     = google_cloud_run_v2_service.baton.name
  location = google_cloud_run_v2_service.baton.location
  role     = "roles/run.invoker"
  member   = each.value
}

output "url" {
  value = google_cloud_run_v2_service.baton.uri
}
